"""Going back: what a mark and a rewind cost, and how many tokens a second a draft gives.

    python benchmarks/rewind.py marks --mixer gla           a mark and a rewind, against reading all tokens anew
    python benchmarks/rewind.py speculative --agreement .8  a draft of 5 million parameters with a target of 340

The models have random weights, so no draft would agree with its target. `speculative` computes the draft, and then
writes the target's own next token into its logits for a share `agreement` of the positions, by a fixed draw: speeds are
measured, and the agreement is given. Prompt lookup is as it is: it proposes what the text has repeated.
"""

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import typer

from headrace import zoo
from headrace.hf import HeadraceCache
from headrace.hf.cache import NAME
from headrace.studies.bench.models import Shape, build
from program import Log, Output, Quick, show
from record import RESULTS, Row

MARKS, SPECULATIVE = RESULTS / "rewind.csv", RESULTS / "speculative.csv"
SMALL, DRAFT = Shape(2, 256, 4, 256), Shape(4, 256, 4, 8192)
MORE = ["softmax-gla", "softmax-gated-deltanet", "mamba", "rwkv4", "rwkv7", "mla", "transformer"]
MIXERS = [*zoo.LINEAR, *MORE]
AGREEMENT = [0.6, 0.9]
app = typer.Typer(help=__doc__)


def milliseconds(function: Callable[[], Any], before: Callable[[], Any], rounds: int) -> float:
    """The median time of a call, each after `before`, which is not timed."""
    times = []
    for _ in range(rounds):
        before()
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1e3 * median(times)


@torch.inference_mode()
def of_a_mixer(mixer: str, shape: Shape, tokens: int, removed: int, rounds: int) -> Row:
    """A cache of `tokens` columns with a mark, and 2 · `removed` more, of which half are forgotten."""
    model: Any = build(mixer, shape).eval()
    ids, cache = torch.randint(shape.vocab_size, (1, tokens + 2 * removed)), HeadraceCache()
    model(ids[:, :tokens], past_key_values=cache)

    def unmarked() -> None:
        cache.drop_marks()

    def ahead() -> None:
        if cache.columns > tokens:
            cache.rewind(cache.columns - tokens)
        model(ids[:, tokens:], past_key_values=cache, logits_to_keep=1)

    def go_back() -> None:
        cache.rewind(removed)
        model.settle(cache)

    def read_anew() -> None:
        model(ids[:, : tokens + removed], past_key_values=HeadraceCache(), logits_to_keep=1)

    marking = milliseconds(cache.mark, unmarked, rounds)
    rewinding = milliseconds(go_back, ahead, rounds)
    return {
        "mixer": mixer, "layers": shape.layers, "width": shape.hidden_size, "tokens": tokens, "removed": removed,
        "mark_bytes": cache.mark_bytes, "mark_ms": round(marking, 4), "rewind_ms": round(rewinding, 3),
        "anew_ms": round(milliseconds(read_anew, lambda: None, rounds), 3),
    }  # fmt: skip


@app.command()
def marks(
    quick: Quick = False,
    mixer: Annotated[list[str], typer.Option(help="These mixers only; may be repeated.")] = [],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="Tokens before the mark.")] = 1024,
    removed: Annotated[int, typer.Option(help="Tokens that are forgotten, and that are read again.")] = 16,
    threads: int = 1,
    output: Output = MARKS,
) -> None:
    """Time marks and rewinds of a model of every mixer, against reading all tokens anew."""
    torch.set_num_threads(threads)
    log, shape = Log(output), SMALL
    for name in mixer or (["gla", "transformer"] if quick else MIXERS):
        log.add([of_a_mixer(name, shape, tokens if not quick else 64, removed, 3 if quick else 9)])
    header = ["", "mark\nbytes", "mark\nms", "rewind\nms", "anew\nms", "anew /\nrewind"]
    lines = [
        [row["mixer"], f"{row['mark_bytes']:,}", f"{row['mark_ms']:.3f}", f"{row['rewind_ms']:.1f}",
         f"{row['anew_ms']:.1f}", f"{row['anew_ms'] / row['rewind_ms']:.1f}"]
        for row in log.rows
    ]  # fmt: skip
    show(f"Forgetting {removed} of {tokens + 2 * removed} tokens", header, lines)
    log.end()


def steered(draft: Any, script: list[int], agreement: float) -> Any:
    """The draft, computed as ever, with the script's token as the likeliest one at a share of the positions."""
    step = draft.engine.step

    def agreeing(model: Any, tokens: torch.Tensor, cache: HeadraceCache) -> torch.Tensor:
        logits, at = step(model, tokens, cache), cache.columns
        if at < len(script) and random.Random(at).random() < agreement:
            logits[..., script[at]] = logits.max() + 100
        return logits

    draft.engine.step = agreeing
    return draft


@app.command()
def speculative(
    quick: Quick = False,
    mixer: Annotated[str, typer.Option(help="Of the target and the draft.")] = "gla",
    agreement: Annotated[list[float], typer.Option(help="Shares of positions where the draft agrees.")] = AGREEMENT,
    proposed: Annotated[int, typer.Option(help="Tokens that are proposed at a time.")] = 5,
    tokens: int = 64,
    layers: Annotated[int, typer.Option(help="Layers of the target; 24 are 340 million parameters.")] = 24,
    threads: int = 1,
    output: Output = SPECULATIVE,
) -> None:
    """Time greedy generation with a draft and with prompt lookup, against generation without."""
    torch.set_num_threads(threads)
    log = Log(output)
    size = SMALL if quick else Shape(layers, 1024, 4, DRAFT.vocab_size)
    target: Any = build(mixer, size).eval()
    ids = torch.randint(size.vocab_size, (1, 32))
    settings = {"max_new_tokens": 8 if quick else tokens, "do_sample": False, "eos_token_id": None}

    def timed(how: str, **options: Any) -> torch.Tensor:
        cache = HeadraceCache()
        started = time.perf_counter()
        out = target.generate(ids, **settings, **options, **{NAME: cache})
        seconds = time.perf_counter() - started
        offered, accepted = (sum(x) for x in zip(*cache.drafts, strict=True)) if cache.drafts else (0, 0)
        row = {
            "mixer": mixer, "target": sum(p.numel() for p in target.parameters()), "how": how, "proposed": proposed,
            "tokens": settings["max_new_tokens"], "accepted": round(accepted / offered, 3) if offered else "",
            "tokens_per_pass": round(settings["max_new_tokens"] / max(len(cache.drafts), 1), 2) if cache.drafts else 1,
            "tokens_per_second": round(settings["max_new_tokens"] / seconds, 2),
        }  # fmt: skip
        log.add([row])
        return out

    target.generate(ids, **settings | {"max_new_tokens": 2})  # reads the weights for the first time
    expected = timed("plain")
    timed("prompt lookup", prompt_lookup_num_tokens=proposed)
    for share in agreement:
        draft = steered(build(mixer, SMALL if quick else DRAFT).eval(), expected[0].tolist(), share)
        draft.generation_config.num_assistant_tokens = proposed
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        timed(f"draft that agrees at {share:.0%}", assistant_model=draft)
    header = ["", "accepted", "tokens\nper pass", "tokens\nper second"]
    names = ("how", "accepted", "tokens_per_pass", "tokens_per_second")
    title = f"{mixer}, {log.rows[0]['target'] / 1e6:.0f} million parameters"
    show(title, header, [[str(row[n]) for n in names] for row in log.rows])
    log.end()


if __name__ == "__main__":
    app()
