"""The CPU overhead of calls of `linear_attention` that launch Triton kernels, on a GPU that is not there (see dry/).

    python benchmarks/host.py
    python benchmarks/host.py --family scalar --rounds 1000

A call does what it does on a GPU up to the launches: checks, dispatch, autograd and Triton's choice of the compiled
kernel. Three things differ: results are allocated on the CPU, each launch is recorded and not made, and tensors are
asked for the GPU through replaced functions. The backends take turns; times are medians.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import typer

from headrace import InputError, linear_attention
from launches import GPUS, ON_CPU
from peers import FAMILIES
from program import Log, Output, show
from record import RESULTS, Row

SHAPE = {"T": 128, "K": 64, "V": 64}
BEFORE = 20  # calls that compile and fill caches


def calls(family: str, backend: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns the forward without gradients, and forward and backward. Raises InputError if the backend refuses."""
    tensors = FAMILIES[family].inputs(**SHAPE, dtype=torch.bfloat16)
    settings = FAMILIES[family].options() | {"backend": backend}
    plain = {name: x.detach() for name, x in tensors.items()}
    trained = [x for x in tensors.values() if x.requires_grad]

    def both():
        out, _ = linear_attention(**tensors, **settings)
        return torch.autograd.grad(out, trained, torch.ones_like(out), allow_unused=True)

    def forward():
        return linear_attention(**plain, **settings)

    forward()
    return forward, both


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def measured(family: str, backends: list[str], rounds: int, launches: list) -> list[Row]:
    """The backends that take the family: launches of both ways, and the microseconds of forward and of both ways."""
    able = {}
    for backend in backends:
        try:
            able[backend] = calls(family, backend)
        except InputError as error:
            print(f"{family}: {error}")
    times: dict[str, tuple[list[float], list[float]]] = {backend: ([], []) for backend in able}
    counts = {}
    for i in range(BEFORE + rounds):
        for backend, (forward, both) in able.items():
            one = microseconds(forward)
            launches.clear()
            two, counts[backend] = microseconds(both), len(launches)
            if i >= BEFORE:
                times[backend][0].append(one)
                times[backend][1].append(two)
    return [
        {
            "backend": backend, "family": family, "launches": counts[backend], "forward": round(median(forward), 1),
            "both": round(median(both), 1), "rounds": rounds,
        }
        for backend, (forward, both) in times.items()
    ]  # fmt: skip


def main(
    gpu: Annotated[str, typer.Option(help="GPU, of: " + ", ".join(GPUS))] = "sm_90",
    family: Annotated[list[str], typer.Option(help="Recurrences: " + ", ".join(FAMILIES))] = list(FAMILIES),  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each backend.")] = 300,
    output: Output = RESULTS / "host.csv",
) -> None:
    """Measure the CPU overhead of calls that launch Triton kernels."""
    import triton

    import dry
    from headrace.ops.dispatch import BACKENDS

    log = Log(output)
    with dry.gpu(gpu) as launches:
        for name in family:
            rows = measured(name, [x for x in BACKENDS if x not in ON_CPU], rounds, launches)
            log.add([{"gpu": gpu, "triton": triton.__version__} | row for row in rows])
    lines = [[f"{x['family']}: {x['backend']}", f"{x['forward']:.0f}", f"{x['both']:.0f}"] for x in log.rows]
    show("µs of a call", ["", "forward", "both ways"], lines)
    log.end()


if __name__ == "__main__":
    typer.run(main)
