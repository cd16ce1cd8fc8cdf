"""Whether the time of the op depends on how fast memory fades: the same call at several decays, in turn.

    python benchmarks/decays.py --quick
    python benchmarks/decays.py                                on an otherwise idle machine

What a strong decay leaves of a memory are denormal numbers, with which most processors compute many times slower.
"""

import itertools
from functools import partial
from typing import Annotated

import torch
import typer

from headrace import backends
from op import HEADS, MODES, ours
from peers import FAMILIES
from program import Log, Output, Quick, show
from record import RESULTS, Row
from turns import CPU, Runner, take_turns

DECAYS = (-0.01, -1.0, -2.0, -3.0, -5.0, -10.0, -30.0, -100.0)  # logarithms, a token
DECAYING = [name for name, family in FAMILIES.items() if family.decay in ("BTH", "BTHK") and not family.bonus]
K, V = 128, 256


def runner(name: str, backend: str, tokens: int, log_decay: float) -> Runner:
    tensors = FAMILIES[name].inputs(T=tokens, H=HEADS, K=K, V=V)
    tensors["log_decay"] = torch.full_like(tensors["log_decay"], log_decay).requires_grad_()
    return Runner(f"{log_decay:g}", partial(ours, FAMILIES[name], backend), tensors)


def measure(name: str, backend: str, tokens: int, backward: bool, rounds: int) -> list[Row]:
    """The ratio of a decay is its time over that of the first of DECAYS, the median over rounds."""
    runners = [runner(name, backend, tokens, log_decay) for log_decay in DECAYS]
    take_turns(runners, backward, rounds)
    call = {"family": name, "backend": backend, "T": tokens, "K": K, "V": V, "mode": MODES[backward]}
    return [
        call | {
            "log_decay": log_decay, "rounds": rounds, "cpu_ms": r.milliseconds(CPU), "spread": r.spread(CPU),
            "ratio": round(r.over(runners[0], CPU), 3),
        }
        for log_decay, r in zip(DECAYS, runners, strict=True)
    ]  # fmt: skip


def main(
    quick: Quick = False,
    family: Annotated[list[str], typer.Option(help="Any with a decay by token; may be repeated.")] = DECAYING,
    backend: Annotated[list[str], typer.Option(help="May be repeated.")] = ["native"],  # noqa: B006
    rounds: int = 9,
    output: Output = RESULTS / "decays.csv",
) -> None:
    """Time the op at several decays."""
    torch.set_num_threads(1)
    log, tokens = Log(output), 64 if quick else 2048
    usable = [name for name in backend if backends()[name]["linear_attention"] is None]
    for name, computed_by, backward in itertools.product(family, usable, (False, True)):
        log.add(measure(name, computed_by, tokens, backward, 2 if quick else rounds))
    lines = [
        [", ".join(call), *(f"[bold]{row['ratio']:.2f}[/] {row['cpu_ms']:.1f}" for row in rows)]
        for call, rows in itertools.groupby(log.rows, lambda row: (row["family"], row["backend"], row["mode"]))
    ]
    show("Time over that at the first decay, and ms", ["", *(f"{log_decay:g}" for log_decay in DECAYS)], lines)
    log.end()


if __name__ == "__main__":
    typer.run(main)
