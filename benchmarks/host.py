"""The CPU overhead of calls of `linear_attention` that launch Triton kernels, on a GPU that is not there (see dry/).

    python benchmarks/host.py
    python benchmarks/host.py --family scalar --rounds 1000

A call does what it does on a GPU up to the launches: checks, dispatch, autograd and Triton's choice of the compiled
kernel. Three things differ: results are allocated on the CPU, each launch is recorded and not made, and tensors are
asked for the GPU through replaced functions. The backends take turns; times are medians.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from headrace import InputError, linear_attention
from launches import GPUS, ON_CPU
from peers import FAMILIES
from record import append, environment

RESULTS = Path(__file__).parent / "results" / "host.csv"
SHAPE = {"T": 128, "K": 64, "V": 64}
BEFORE = 20  # calls that compile and fill caches


@dataclass(frozen=True)
class Row:
    """One backend's call: a line of the CSV file."""

    gpu: str
    triton: str
    backend: str
    family: str
    launches: int
    forward: float  # microseconds, without gradients
    both: float  # microseconds of forward and backward
    rounds: int


def calls(family: str, backend: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns the forward without gradients, and forward and backward. Raises InputError if the backend refuses."""
    tensors = FAMILIES[family].inputs(**SHAPE, dtype=torch.bfloat16)
    settings = FAMILIES[family].options() | {"backend": backend}
    plain = {name: x.detach() for name, x in tensors.items()}
    wanted = [x for x in tensors.values() if x.requires_grad]

    def both():
        out, _ = linear_attention(**tensors, **settings)
        return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    def forward():
        return linear_attention(**plain, **settings)

    forward()
    return forward, both


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def measured(family: str, backends: list[str], rounds: int, launches: list) -> list[tuple[str, int, float, float]]:
    """Returns (backend, launches of both ways, forward, both ways) of the backends that take the family."""
    found = {}
    for backend in backends:
        try:
            found[backend] = calls(family, backend)
        except InputError as error:
            print(f"{family}: {error}")
    times: dict[str, tuple[list[float], list[float]]] = {backend: ([], []) for backend in found}
    counts = {}
    for i in range(BEFORE + rounds):
        for backend, (forward, both) in found.items():
            one = microseconds(forward)
            launches.clear()
            two, counts[backend] = microseconds(both), len(launches)
            if i >= BEFORE:
                times[backend][0].append(one)
                times[backend][1].append(two)
    return [(backend, counts[backend], *(median(x) for x in taken)) for backend, taken in times.items()]


def main(
    gpu: Annotated[str, typer.Option(help="GPU, of: " + ", ".join(GPUS))] = "sm_90",
    family: Annotated[list[str], typer.Option(help="Recurrences: " + ", ".join(FAMILIES))] = list(FAMILIES),  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each backend.")] = 300,
    output: Annotated[Path, typer.Option(help="CSV file to append to.")] = RESULTS,
) -> None:
    """Measure the CPU overhead of calls that launch Triton kernels."""
    import triton

    import dry
    from headrace.ops.dispatch import BACKENDS

    with dry.gpu(gpu) as launches:
        for name in family:
            found = measured(name, [x for x in BACKENDS if x not in ON_CPU], rounds, launches)
            rows = [
                Row(gpu, triton.__version__, backend, name, count, round(forward, 1), round(both, 1), rounds)
                for backend, count, forward, both in found
            ]
            for row in rows:
                print(
                    f"{name:12} {row.backend:7} forward {row.forward:5.0f} µs, both ways {row.both:5.0f} µs", flush=True
                )
            append(output, environment("cpu"), rows)


if __name__ == "__main__":
    typer.run(main)
