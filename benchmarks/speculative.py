"""Tokens per second of speculative decoding: a draft of 5 million parameters with a target of 340.

    python benchmarks/speculative.py --agreement .8

The models have random weights, so no draft would agree with its target. The draft is computed, and then the target's
own next token is written into its logits for a share `agreement` of the positions, by a fixed draw: speeds are
measured, and the agreement is given. Prompt lookup is as it is: it proposes what the text has repeated.
"""

import random
import time
from typing import Annotated, Any

import torch
import typer

from headrace.hf import HeadraceCache
from headrace.hf.cache import NAME
from headrace.studies.bench.models import Shape, build
from program import Log, Output, Quick, show
from record import RESULTS, markdown, newest, read

SMALL, DRAFT = Shape(2, 256, 4, 256), Shape(4, 256, 4, 8192)
AGREEMENT = [0.6, 0.9]
app = typer.Typer(help=__doc__)


def steered(draft: Any, script: list[int], agreement: float) -> Any:
    """The draft, computed as ever, with the script's token as the likeliest one at a share of the positions."""
    read = draft.engine.read

    def agreeing(model: Any, ids: torch.Tensor, cache: HeadraceCache) -> torch.Tensor | None:
        logits, at = read(model, ids, cache), cache.columns
        if logits is not None and at < len(script) and random.Random(at).random() < agreement:
            logits[:, -1, script[at]] = logits.max() + 100
        return logits

    draft.engine.read = agreeing
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
    output: Output = RESULTS / "speculative.csv",
) -> None:
    """Time greedy generation with a draft and with prompt lookup, against generation without."""
    torch.set_num_threads(threads)
    log = Log(output)
    size = SMALL if quick else Shape(layers, 1024, 4, DRAFT.vocab_size)
    target: Any = build(mixer, size).eval()
    ids = torch.randint(size.vocab_size, (1, 32))
    settings = {"max_new_tokens": 8 if quick else tokens, "do_sample": False, "eos_token_id": None}

    target.generate(ids, **settings | {"max_new_tokens": 2})  # reads the weights for the first time

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


def lines() -> list[str]:
    """The table of docs/states.md: the newest row of each way, with what it was measured on."""
    rows = newest(read(RESULTS / "speculative.csv"), "mixer", "target", "how", "proposed", "threads")
    about = "{machine}, torch {torch}, commit {commit}, {date:.10}"
    cells = [[f"{r['mixer']}, {r['how']}, {r['threads']} thread(s)", r["accepted"], r["tokens_per_pass"],
              r["tokens_per_second"]] for r in rows]  # fmt: skip
    header = ["", "accepted", "tokens per pass", "tokens/s"]
    return ["; ".join(dict.fromkeys(about.format(**r) for r in rows)) + ".", "", *markdown(header, cells)]


if __name__ == "__main__":
    app()
