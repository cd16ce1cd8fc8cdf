"""Whether the time of the op depends on how fast memory fades: the same call at several decays, in turn.

    python benchmarks/decays.py --quick
    python benchmarks/decays.py                                on an otherwise idle machine

What a strong decay leaves of a memory are denormal numbers, with which most processors compute many times slower.
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
from op import HEADS, MODES, ours
from peers import FAMILIES, Family
from record import append, environment
from turns import Runner, take_turns

RESULTS = Path(__file__).parent / "results" / "decays.csv"
DECAYS = (
    -0.01,
    -1.0,
    -2.0,
    -3.0,
    -5.0,
    -10.0,
    -30.0,
    -100.0,
)  # logarithms, a token
DECAYING = [name for name, family in FAMILIES.items() if family.decay in ("BTH", "BTHK") and not family.bonus]
K, V = 128, 256
CPU = 0
console = Console(width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Row:
    family: str
    backend: str
    T: int
    K: int
    V: int
    mode: str
    log_decay: float
    rounds: int
    cpu_ms: float
    spread: float
    ratio: float  # this decay's time over that of the first of DECAYS, the median over rounds


def runner(family: Family, backend: str, tokens: int, log_decay: float) -> Runner:
    tensors = family.inputs(T=tokens, H=HEADS, K=K, V=V)
    tensors["log_decay"] = torch.full_like(tensors["log_decay"], log_decay).requires_grad_()
    return Runner(f"{log_decay:g}", partial(ours, family, backend), tensors)


def measure(name: str, backend: str, tokens: int, backward: bool, rounds: int) -> list[Row]:
    runners = [runner(FAMILIES[name], backend, tokens, log_decay) for log_decay in DECAYS]
    take_turns(runners, backward, rounds)
    return [
        Row(
            name, backend, tokens, K, V, MODES[backward], log_decay, rounds, round(1e3 * median(r.times(CPU)), 3),
            round(spread(r.times(CPU)) or 0.0, 3), round(r.over(runners[0], CPU), 3),
        )
        for log_decay, r in zip(DECAYS, runners, strict=True)
    ]  # fmt: skip


def main(
    quick: Annotated[bool, typer.Option(help="Short sequences and two rounds: does everything run?")] = False,
    family: Annotated[list[str], typer.Option(help="Any with a decay by token; may be repeated.")] = DECAYING,
    backend: Annotated[list[str], typer.Option(help="May be repeated.")] = ["native"],  # noqa: B006
    rounds: int = 9,
    output: Annotated[Path, typer.Option(help="The CSV file to append to.")] = RESULTS,
) -> None:
    """Time the op at several decays."""
    torch.set_num_threads(1)
    about, tokens, found = environment("cpu"), 64 if quick else 2048, []
    usable = [name for name in backend if backends()[name]["linear_attention"] is None]
    for name, computed_by, backward in itertools.product(family, usable, (False, True)):
        found += (rows := measure(name, computed_by, tokens, backward, 2 if quick else rounds))
        append(output, about, rows)
    table = Table(title="Time over that at the first decay, and ms", title_justify="left")
    for title in ("", *(f"{log_decay:g}" for log_decay in DECAYS)):
        table.add_column(title, justify="right" if title else "left")
    for (name, computed_by, mode), rows in itertools.groupby(found, lambda r: (r.family, r.backend, r.mode)):
        table.add_row(f"{name}, {computed_by}, {mode}", *(f"[bold]{r.ratio:.2f}[/] {r.cpu_ms:.1f}" for r in rows))
    console.print(table)
    console.print(f"{len(found)} rows appended to {output}; {about['machine']}")


if __name__ == "__main__":
    typer.run(main)
