"""One token of the op: its state must be read once and written once, so that is what it is measured against.

    python benchmarks/step.py --quick
    python benchmarks/step.py --ggml ggml/build/src/libggml.so

As many states as a model has layers are each stepped in turn, so that they do not stay in the second cache.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from compiled import PATHS, Graph
from headrace import step
from headrace.ops.backends.native import library as native
from headrace.ops.call import Call
from headrace.studies.report.numbers import spread
from op import HEADS
from peers import FAMILIES, PEERS
from record import append, environment
from turns import Runner, take_turns

RESULTS = Path(__file__).parent / "results" / "step.csv"
FAMILY = ("linear", "scalar", "vector", "gated-delta", "kda")
SIZES, LAYERS = ((128, 256), (128, 128)), 24
OVER_TIME = 2  # dimensions that a tensor with one token has at least
console = Console(width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Row:
    family: str
    K: int
    V: int
    layers: int
    runner: str
    rounds: int
    us_per_layer: float
    spread: float
    over_floor: float  # over reading and writing the states once, the median over rounds
    ratio: float  # over ours


def token(family: str, K: int, V: int, seed: int) -> dict:
    return {name: x.detach() for name, x in FAMILIES[family].inputs(T=1, H=HEADS, K=K, V=V, seed=seed).items()}


def ours(family: str, layers: list[dict], V: int, competing: bool) -> Runner:
    tensors = [{name: x[:, 0] if x.dim() > OVER_TIME else x for name, x in own.items()} for own in layers]
    states = [torch.zeros(1, HEADS, own["k"].shape[-1], V) for own in tensors]
    logits = torch.randn(2, 1, HEADS, generator=torch.Generator().manual_seed(0))

    def call(_):
        for i, own in enumerate(tensors):
            read, write = HEADS * logits.softmax(-1) if competing else (None, None)
            options = FAMILIES[family].options() | {"read_gate": read, "write_gate": write}
            _, states[i] = step(**own, state=states[i], **options)

    return Runner(f"headrace{', heads competing' * competing}", call, {})


def kernel(family: str, layers: list[dict], V: int) -> Runner:
    """What a layer's token runs inside its one native call: the state changed where it lies, no Python around it."""
    options = FAMILIES[family].options()
    states = [torch.zeros(1, HEADS, own["k"].shape[-1], V) for own in layers]
    calls = []
    for own, state in zip(layers, states, strict=True):
        tensors = {name: own.get(name) for name in Call._fields[:9]}
        settings = {"delta": options.get("rule") == "delta", "scale": options.get("scale", 1.0), "chunk_size": None}
        problem, out = native.Problem(Call(**tensors, **settings)), torch.empty_like(own["v"])
        calls.append((problem, native.PLACE.pack(*native.place(out)), state.data_ptr(), (out, state)))

    def call(_):
        for problem, into, state, _alive in calls:
            native.check(native.library.hr_step(problem.packed, into, state))

    return Runner("headrace's kernel, in place", call, {})


def floor(K: int, V: int) -> Runner:
    states = [torch.ones(1, HEADS, K, V) for _ in range(LAYERS)]
    return Runner("the state, read and written", lambda _: [state.mul_(1.0) for state in states], {})


def contestants(family: str, K: int, V: int) -> list[Runner]:
    """Ours first, the floor last."""
    layers = [token(family, K, V, seed) for seed in range(LAYERS)]
    found = [ours(family, layers, V, competing) for competing in (False, True)]
    if native.missing is None and not FAMILIES[family].options().get("normalise") and "bonus" not in layers[0]:
        found.append(kernel(family, layers, V))
    for peer in (p for p in PEERS if p.family == family and p.source.startswith("ggml")):
        if peer.missing() is None and K == V and K % peer.multiple == 0:
            graph = Graph(peer.source.split(":")[-1], [peer.arguments(own) for own in layers])
            found.append(Runner(peer.name, lambda _, graph=graph: graph.run(), {}))
    return [*found, floor(K, V)]


def measure(family: str, K: int, V: int, rounds: int) -> list[Row]:
    runners = contestants(family, K, V)
    take_turns(runners, False, rounds)
    return [
        Row(
            family, K, V, LAYERS, runner.name, rounds, round(1e6 * median(runner.times(0)) / LAYERS, 2),
            round(spread(runner.times(0)) or 0.0, 3), round(runner.over(runners[-1], 0), 3),
            round(runner.over(runners[0], 0), 3),
        )
        for runner in runners
    ]  # fmt: skip


def main(
    quick: Annotated[bool, typer.Option(help="Few rounds: does everything run?")] = False,
    rounds: int = 200,
    ggml: Annotated[Path | None, typer.Option(help="libggml.so, for its operators.")] = None,
    output: Annotated[Path, typer.Option(help="The CSV file to append to.")] = RESULTS,
) -> None:
    """Time one token."""
    torch.set_num_threads(1)
    PATHS["ggml"] = ggml
    about, found = environment("cpu"), []
    for family, (K, V) in itertools.product(FAMILY, SIZES):
        found += (new := measure(family, K, V, 5 if quick else rounds))
        append(output, about, new)
    table = Table(title=f"one token of a layer, {LAYERS} layers in turn", title_justify="left")
    for title in ("", "K×V", "over the floor", "over ours", "µs"):
        table.add_column(title, justify="right" if title else "left")
    for row in found:
        size = f"{row.K}×{row.V}"
        table.add_row(f"{row.family}: {row.runner}", size, f"[bold]{row.over_floor:.2f}[/]", f"{row.ratio:.2f}",
                      f"{row.us_per_layer:.1f} ±{row.spread:.0%}")  # fmt: skip
    console.print(table)
    console.print(f"{len(found)} rows appended to {output}; {about['machine']}")


if __name__ == "__main__":
    typer.run(main)
