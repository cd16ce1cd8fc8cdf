"""What a second thread gives the op: the same calls on one thread and on several, in turn, by the wall clock.

    python benchmarks/threads.py --quick
    python benchmarks/threads.py --threads 2                   on an otherwise idle machine with as many cores

PyTorch's own matrix product goes first. Where it gains nothing, the machine had no core to spare, and the other lines
say nothing of us.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from headrace import backends
from headrace.studies.report.numbers import spread
from op import HEADS, MODES, can, ours
from peers import FAMILIES
from record import append, environment
from turns import PEAK, Runner, peak, take_turns

RESULTS = Path(__file__).parent / "results" / "threads.csv"
BATCHES, T, K, V = (1, 4), 2048, 128, 256
WALL = 1
console = Console(width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Row:
    family: str
    backend: str
    B: int
    T: int
    K: int
    V: int
    mode: str
    rounds: int
    one_ms: float
    several_ms: float
    spread: float
    speedup: float  # one thread's time over that of several, the median over rounds


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
    backend, (one, several) = pair(name, B, tokens, threads)
    take_turns([one, several], backward, rounds)
    return Row(
        name, backend, B, tokens, K, V, MODES[backward], rounds, round(1e3 * median(one.times(WALL)), 3),
        round(1e3 * median(several.times(WALL)), 3), round(spread(several.times(WALL)) or 0.0, 3),
        round(one.over(several, WALL), 3),
    )  # fmt: skip


def main(
    quick: Annotated[bool, typer.Option(help="Short sequences and two rounds: does everything run?")] = False,
    family: Annotated[list[str], typer.Option(help=f"Any of {', '.join(FAMILIES)}; may be repeated.")] = list(FAMILIES),  # noqa: B006
    threads: Annotated[int, typer.Option(help="How many are compared with one.")] = 2,
    rounds: int = 9,
    output: Annotated[Path, typer.Option(help="The CSV file to append to.")] = RESULTS,
) -> None:
    """Time the op on one thread and on several."""
    torch.set_num_threads(threads)
    about, found = environment("cpu"), []
    for name, B, backward in itertools.product([PEAK, *family], BATCHES, (False, True)):
        found.append(measure(name, B, 64 if quick else T, backward, threads, 2 if quick else rounds))
        append(output, about, found[-1:])
    table = Table(title=f"{threads} threads: times as fast as one, ms", title_justify="left")
    for title in ("", *(f"{mode}\nB={B}" for B in BATCHES for mode in MODES)):
        table.add_column(title, justify="right" if title else "left")
    for name, group in itertools.groupby(found, lambda row: row.family):
        table.add_row(name, *(f"[bold]{row.speedup:.2f}[/]  {row.several_ms:.1f} ±{row.spread:.0%}" for row in group))
    console.print(table)
    console.print(f"{len(found)} rows appended to {output}; {about['machine']}")


if __name__ == "__main__":
    typer.run(main)
