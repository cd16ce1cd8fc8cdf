"""What a state costs to keep, as a snapshot and to go back to, beside the keys and values of softmax attention.

    python benchmarks/states.py measure --quick           up to token 1,000
    python benchmarks/states.py measure --mixer gla       one model; otherwise those of the table
    python benchmarks/states.py measure --beams           beam search and several answers, the prompt read once

adds rows to results/states.csv and results/beams.csv, and `python benchmarks/states.py show` prints the tables of
research/docs/benchmarks.md. Times are CPU times of one thread. The models are language models with random weights.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Annotated, Any

import torch
import typer
from transformers import GenerationMixin

import record
from headrace import HeadraceCache
from headrace.hf import HeadraceConfig, HeadraceForCausalLM
from headrace.hf.cache import NAME as CACHE
from program import Log, Quick

RESULTS, BEAMS = (record.RESULTS / f"{name}.csv" for name in ("states", "beams"))
HIDDEN, LAYERS, HEADS, VOCABULARY = 256, 2, 4, 256
HYBRID = "gated-deltanet and transformer"
MIXERS = (
    "linear-attention", "retnet", "gla", "softmax-gla", "mamba2(heads.count=4)", "rwkv6", "deltanet", "gated-deltanet",
    "kda", "rwkv7", "mamba", "rg-lru", "sliding-window", HYBRID, "mla", "gqa(kv_heads=2)", "transformer",
)  # fmt: skip
POSITIONS = 1_000, 8_000, 32_000
AFTER, BACK = 256, 100  # tokens after a snapshot, and how many of them are forgotten
PIECE = 1_000  # tokens of a call
ROUNDS = 7
PROMPT, NEW, ANSWERS = 1_000, 32, 4
COMPARED = "softmax-gla", HYBRID, "transformer"

app = typer.Typer()


def build(mixer: str) -> HeadraceForCausalLM:
    torch.manual_seed(0)
    mixers: Any = mixer.split(" and ") if " and " in mixer else mixer
    config = HeadraceConfig(
        mixer=mixers, vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_heads=HEADS
    )
    return HeadraceForCausalLM(config).eval()


def seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def read(model: Any, cache: HeadraceCache, tokens: int) -> None:
    for begin in range(0, tokens, PIECE):
        ids = torch.randint(VOCABULARY, (1, min(PIECE, tokens - begin)))
        model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)


@torch.inference_mode()
def measure(mixer: str, positions: tuple[int, ...], rounds: int) -> Iterator[record.Row]:
    """Reads up to each position, takes a snapshot, reads AFTER tokens, forgets BACK of them, then the rest."""
    model, cache, spent = build(mixer), HeadraceCache(), 0.0
    read(model, HeadraceCache(), AFTER)  # warms up
    for position in positions:
        spent += seconds(lambda to=position: read(model, cache, to - cache.columns))
        size = sum(x.nbytes for state in cache.states or [] for x in state or () if isinstance(x, torch.Tensor))
        times: dict[str, list[float]] = {"mark": [], "token": [], "back": [], "replay": []}
        for _ in range(rounds):
            before = cache.snapshots.nbytes
            times["mark"].append(seconds(cache.snapshot))
            added = cache.snapshots.nbytes - before
            read(model, cache, AFTER)
            times["replay"].append(seconds(lambda: (cache.rewind(BACK), model.read_pending(cache))))
            times["back"].append(seconds(lambda: (cache.rewind(AFTER - BACK), model.read_pending(cache))))
            times["token"].append(seconds(lambda: read(model, cache, 1)))
        milliseconds = {f"{name}_ms": round(1e3 * median(own), 4) for name, own in times.items()}
        yield {
            "name": mixer, "position": position, "state_bytes": size, "mark_bytes": added, **milliseconds,
            "read_ms": round(1e3 * spent, 1),
        }  # fmt: skip


@contextmanager
def read_by_each() -> Iterator[None]:
    """transformers' own way: the prompt is read by each beam."""
    ours = HeadraceForCausalLM._prefill
    HeadraceForCausalLM._prefill = GenerationMixin._prefill  # type: ignore[method-assign]
    try:
        yield
    finally:
        HeadraceForCausalLM._prefill = ours  # type: ignore[method-assign]


def beams(mixer: str, rounds: int) -> Iterator[record.Row]:
    model, ids = build(mixer), torch.randint(VOCABULARY, (1, PROMPT))
    several = {"num_beams": ANSWERS, "do_sample": False}, {"num_return_sequences": ANSWERS, "do_sample": True}
    for options in several:
        times: dict[str, list[float]] = {"each_ms": [], "once_ms": []}

        def run(given=options):
            model.generate(ids, **given, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)

        for _ in range(rounds):
            with read_by_each():
                times["each_ms"].append(seconds(run))
            times["once_ms"].append(seconds(run))
        taken = {name: round(1e3 * median(own), 1) for name, own in times.items()}
        yield {"name": mixer, "strategy": next(iter(options)), "prompt": PROMPT, "new": NEW, "rows": ANSWERS, **taken}


@app.command("measure")
def main(
    mixer: Annotated[list[str], typer.Option(help="Models of these mixers only; may be repeated.")] = [],  # noqa: B006
    with_beams: Annotated[bool, typer.Option("--beams", help="Beam search and several answers.")] = False,
    quick: Quick = False,
) -> None:
    """Measure, and add rows to the results."""
    torch.set_num_threads(1)
    log, rounds = Log(BEAMS if with_beams else RESULTS), 2 if quick else ROUNDS
    for name in mixer or (COMPARED if with_beams else MIXERS):
        log.add([*(beams(name, rounds) if with_beams else measure(name, POSITIONS[: 1 if quick else None], rounds))])
    log.end()


@app.command()
def show() -> None:
    """Print the tables."""
    print("\n".join([*lines(), "", *beam_lines()]))


def amount(number: str) -> str:
    """Bytes in at most three digits."""
    value, unit = float(number), 0
    while value >= 1e3:
        value, unit = value / 1e3, unit + 1
    return f"{value:.3g} {('bytes', 'KB', 'MB')[unit]}"


def duration(milliseconds: str) -> str:
    return f"{float(milliseconds):,.0f}" if float(milliseconds) >= 10 else f"{float(milliseconds):.2g}"


def lines() -> list[str]:
    rows = record.newest(record.read(RESULTS), "name", "position")
    by_mixer = {name: {int(row["position"]): row for row in rows if row["name"] == name} for name in MIXERS}
    head = ["mixer", *(f"{p:,} tokens" for p in POSITIONS), "a snapshot"]
    sizes = [
        [f"`{name}`", *(amount(own[p]["state_bytes"]) for p in POSITIONS), amount(own[POSITIONS[-1]]["mark_bytes"])]
        for name, own in by_mixer.items()
    ]
    actions = {
        "mark_ms": "snapshot",
        "back_ms": "back to a snapshot",
        "replay_ms": f"back {BACK}, {AFTER} after a snapshot",
    }
    times = [
        [f"`{name}`", *(duration(own[POSITIONS[-1]][key]) for key in actions)]
        + [duration(own[p]["read_ms"]) for p in POSITIONS]
        for name, own in by_mixer.items()
    ]
    again = ["mixer", *actions.values(), *(f"read {p:,}" for p in POSITIONS)]
    return [
        *("Bytes of a sequence:", "", *record.markdown(head, sizes, ["---", *["--:"] * 4]), ""),
        *(f"Milliseconds, the first three after {POSITIONS[-1]:,} tokens:", ""),
        *record.markdown(again, times, ["---", *["--:"] * 6]),
    ]


def draft_lines() -> list[str]:
    """The table of speculative decoding: the newest row of each way, with what it was measured on."""
    rows = record.newest(
        record.read(record.RESULTS / "speculative.csv"), "mixer", "target", "how", "proposed", "threads"
    )
    about = "{machine}, torch {torch}, commit {commit}, {date:.10}"
    cells = [[f"{r['mixer']}, {r['how']}, {r['threads']} thread(s)", r["accepted"], r["tokens_per_pass"],
              r["tokens_per_second"]] for r in rows]  # fmt: skip
    header = ["", "accepted", "tokens per pass", "tokens/s"]
    return ["; ".join(dict.fromkeys(about.format(**r) for r in rows)) + ".", "", *record.markdown(header, cells)]


def beam_lines() -> list[str]:
    """The table of beam search and several answers."""
    rows = record.newest(record.read(BEAMS), "name", "strategy")
    head = ["mixer", "", "read by each, ms", "read once, ms", "ratio"]
    cells = [
        [f"`{row['name']}`", f"`{row['strategy']}={row['rows']}`", *map(duration, (row["each_ms"], row["once_ms"])),
         f"{float(row['once_ms']) / float(row['each_ms']):.2f}"]
        for row in rows
    ]  # fmt: skip
    return record.markdown(head, cells, ["---", "---", *["--:"] * 3])


if __name__ == "__main__":
    app()
