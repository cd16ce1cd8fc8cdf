"""What a second thread gives the op: the same calls on one thread and on several, in turn, by the wall clock.

    python benchmarks/threads.py --quick
    python benchmarks/threads.py --threads 2                   on an otherwise idle machine with as many cores

PyTorch's own matrix product goes first. Where it gains nothing, the machine had no core to spare, and the other lines
say nothing of us.
"""

import itertools
from functools import partial
from typing import Annotated

import torch
import typer

from headrace import backends
from op import HEADS, MODES, Families, can, ours
from peers import FAMILIES
from program import Log, Output, Quick, show
from record import RESULTS, Row
from turns import PEAK, WALL, Runner, peak, take_turns

BATCHES, T, K, V = (1, 4), 2048, 128, 256


def first_backend(family, tensors) -> str:
    available = (name for name, missing in backends().items() if missing["linear_attention"] is None)
    return next(name for name in available if can(family, name, tensors))


def pair(name: str, B: int, tokens: int, threads: int) -> tuple[str, list[Runner]]:
    """Who computes, and the call on one thread and on several."""
    counts = (1, threads)
    if name == PEAK:
        return "torch", [peak(n, "cpu") for n in counts]
    family = FAMILIES[name]
    tensors = family.inputs(B=B, T=tokens, H=HEADS, K=K, V=V)
    backend = first_backend(family, tensors)
    return backend, [Runner(f"{n}", partial(ours, family, backend), tensors, n) for n in counts]


def measure(name: str, B: int, tokens: int, backward: bool, threads: int, rounds: int) -> Row:
    """The speedup is one thread's time over that of several, the median over rounds."""
    backend, (one, several) = pair(name, B, tokens, threads)
    take_turns([one, several], backward, rounds)
    return {
        "family": name, "backend": backend, "B": B, "T": tokens, "K": K, "V": V, "mode": MODES[backward],
        "rounds": rounds, "one_ms": one.milliseconds(WALL), "several_ms": several.milliseconds(WALL),
        "spread": several.spread(WALL), "speedup": round(one.over(several, WALL), 3),
    }  # fmt: skip


def main(
    quick: Quick = False,
    family: Families = list(FAMILIES),  # noqa: B006
    threads: Annotated[int, typer.Option(help="How many are compared with one.")] = 2,
    rounds: int = 9,
    output: Output = RESULTS / "threads.csv",
) -> None:
    """Time the op on one thread and on several."""
    torch.set_num_threads(threads)
    log = Log(output)
    for name, B, backward in itertools.product([PEAK, *family], BATCHES, (False, True)):
        log.add([measure(name, B, 64 if quick else T, backward, threads, 2 if quick else rounds)])
    lines = [
        [name, *(f"[bold]{x['speedup']:.2f}[/]  {x['several_ms']:.1f} ±{x['spread']:.0%}" for x in rows)]
        for name, rows in itertools.groupby(log.rows, lambda row: row["family"])
    ]
    header = ["", *(f"{mode}\nB={B}" for B in BATCHES for mode in MODES)]
    show(f"{threads} threads: times as fast as one, ms", header, lines)
    log.end()


if __name__ == "__main__":
    typer.run(main)
