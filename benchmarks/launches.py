"""The Triton launches of each backend's forward and backward, compiled for GPUs that are not there (see dry/).

    python benchmarks/launches.py                                        all GPUs, minutes each
    python benchmarks/launches.py --gpu sm_90 --family scalar --family kda

Of an autotuned kernel the first configuration is compiled; tuning on a GPU may choose another. Each row of the CSV file
is one launch.
"""

import subprocess
import sys
from typing import Annotated

import torch
import typer
from torch import Tensor

from headrace import InputError, linear_attention
from peers import FAMILIES, Family
from program import Output
from record import RESULTS, Row, append, environment

GPUS = "sm_80", "sm_90", "sm_100", "sm_120", "gfx942"
ON_CPU = {"native", "torch", "onnx"}  # the backends that launch nothing


def both_ways(family: Family, backend: str, tensors: dict[str, Tensor], launches: list) -> int:
    """Runs forward and backward. Returns the number of launches of the forward."""
    out, state = linear_attention(**tensors, **family.options(), backend=backend)
    forward = len(launches)
    torch.autograd.backward([out, state], [torch.ones_like(out), torch.ones_like(state)])
    return forward


def record(gpu: str, family: str, backend: str, shape: dict[str, int]) -> list[Row]:
    """The launches of a family on a GPU. Raises InputError if the backend does not take it. macs: None if they are not
    to be seen in the code."""
    import triton

    import dry

    tensors = FAMILIES[family].inputs(**shape, dtype=torch.bfloat16)
    with dry.gpu(gpu) as launches:
        forward = both_ways(FAMILIES[family], backend, tensors, launches)
    where = {"gpu": gpu, "triton": triton.__version__, "backend": backend, "family": family, **shape}
    return [
        where | {
            "way": "forward" if i < forward else "backward", "kernel": x.kernel,
            "blocks": x.grid[0] * x.grid[1] * x.grid[2], "warps": x.warps, "registers": x.code.registers,
            "stack": x.code.stack, "shared": x.code.shared, "matrix": x.code.matrix, "macs": x.code.macs,
        }
        for i, x in enumerate(launches)
    ]  # fmt: skip


def summary(rows: list[Row]) -> str:
    count = {way: sum(row["way"] == way for row in rows) for way in ("forward", "backward")}
    worst = max(rows, key=lambda row: row["stack"])
    shared = max(row["shared"] for row in rows)
    return (
        f"{worst['gpu']} {worst['backend']} {worst['family']}: {count['forward']} + {count['backward']} launches, "
        f"stack up to {worst['stack']} bytes ({worst['kernel']}), shared memory up to {shared} bytes"
    )


def main(
    gpu: Annotated[list[str], typer.Option(help="GPUs, of: " + ", ".join(GPUS))] = list(GPUS),  # noqa: B006
    family: Annotated[list[str], typer.Option(help="Recurrences: " + ", ".join(FAMILIES))] = list(FAMILIES),  # noqa: B006
    backend: Annotated[list[str] | None, typer.Option(help=r"Backends. \[default: those that launch kernels]")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the one sequence.")] = 512,
    key: Annotated[int, typer.Option(help="Key dimension per head.")] = 128,
    value: Annotated[int, typer.Option(help="Value dimension per head.")] = 128,
    output: Output = RESULTS / "launches.csv",
) -> None:
    """Compile and count the launches of every recurrence for GPUs that are not there."""
    from headrace.ops.dispatch import BACKENDS

    for one in gpu if len(gpu) > 1 else ():  # kernels are imported for one GPU, so each has a process of its own
        others = [word for name in family for word in ("--family", name)]
        others += [word for name in backend or [] for word in ("--backend", name)]
        sizes = ["--tokens", tokens, "--key", key, "--value", value, "--output", output]
        subprocess.run([sys.executable, __file__, "--gpu", one, *others, *map(str, sizes)], check=True)
    if len(gpu) > 1:
        return
    for name in family:
        for engine in backend or [known for known in BACKENDS if known not in ON_CPU]:
            try:
                rows = record(gpu[0], name, engine, {"T": tokens, "K": key, "V": value})
            except InputError as error:
                print(f"{gpu[0]} {name}: {error}")
                continue
            print(summary(rows), flush=True)
            append(output, environment(), rows)


if __name__ == "__main__":
    typer.run(main)
