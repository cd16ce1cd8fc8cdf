"""One token of the op: its state must be read once and written once, so that is what it is measured against.

    python benchmarks/step.py --quick
    GGML=ggml/build/src/libggml.so python benchmarks/step.py

As many states as a model has layers are each stepped in turn, so that they do not stay in the second cache. ggml and
ONNX Runtime step all of them in one call of a graph.
"""

import itertools

import torch
import typer

from headrace import step
from headrace.ops.backends.native import library as native
from headrace.ops.call import Call
from op import HEADS
from peers import FAMILIES, PEERS, graph_of
from program import Log, Output, Quick, show
from record import RESULTS, Row
from turns import CPU, Runner, take_turns

FAMILY = ("linear", "scalar", "vector", "gated-delta", "kda")
SIZES, LAYERS = ((128, 256), (128, 128), (64, 64)), 24
OVER_TIME = 2  # dimensions that a tensor with one token has at least


def token(family: str, K: int, V: int, seed: int) -> dict:
    return {name: x.detach() for name, x in FAMILIES[family].inputs(T=1, H=HEADS, K=K, V=V, seed=seed).items()}


def tokens(layers: list[dict]) -> list[dict]:
    return [{name: x[:, 0] if x.dim() > OVER_TIME else x for name, x in own.items()} for own in layers]


def ours(family: str, layers: list[dict], V: int, competing: bool) -> Runner:
    tensors = tokens(layers)
    states = [torch.zeros(1, HEADS, own["k"].shape[-1], V) for own in tensors]
    logits = torch.randn(2, 1, HEADS, generator=torch.Generator().manual_seed(0))

    def call(_):
        for i, own in enumerate(tensors):
            read, write = HEADS * logits.softmax(-1) if competing else (None, None)
            options = FAMILIES[family].options() | {"read_gate": read, "write_gate": write}
            _, states[i] = step(**own, state=states[i], **options)

    return Runner(f"headrace{', heads competing' * competing}", call, {})


def in_place(family: str, layers: list[dict], V: int, competing: bool) -> Runner:
    tensors, options, gates = tokens(layers), FAMILIES[family].options(), {}
    if competing:
        gates = {"read_gate": torch.rand(1, HEADS), "write_gate": torch.rand(1, HEADS)}
    states = [torch.zeros(1, HEADS, own["k"].shape[-1], V + options["normalize"]) for own in tensors]
    outs = [torch.empty_like(own["v"]) for own in tensors]

    def call(_):
        for own, state, out in zip(tensors, states, outs, strict=True):
            step(**own, **options, **gates, state=state, in_place=True, out=out)

    return Runner(f"headrace, in place{', gates' * competing}", call, {})


def kernel(family: str, layers: list[dict], V: int) -> Runner:
    """What `step` in place runs inside: the state changed where it lies, no Python around it."""
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
    runners = [ours(family, layers, V, competing) for competing in (False, True)]
    runners += [in_place(family, layers, V, competing) for competing in (False, True)]
    if native.missing is None and not FAMILIES[family].options().get("normalize") and "bonus" not in layers[0]:
        runners.append(kernel(family, layers, V))
    for peer in (p for p in PEERS if p.family == family and p.missing() is None):
        make = graph_of(peer.source)
        if make is not None and (K == V or not peer.square) and K % peer.multiple == 0:
            graph = make([peer.arguments(own) for own in layers])
            runners.append(Runner(peer.name, lambda _, graph=graph: graph.run(), {}))
    return [*runners, floor(K, V)]


def measure(family: str, K: int, V: int, rounds: int) -> list[Row]:
    """over_floor: over reading and writing the states once. ratio: over ours. Both are medians over rounds."""
    runners = contestants(family, K, V)
    take_turns(runners, False, rounds)
    return [
        {
            "family": family, "K": K, "V": V, "layers": LAYERS, "runner": runner.name, "rounds": rounds,
            "us_per_layer": round(1e3 * runner.milliseconds(CPU) / LAYERS, 2), "spread": runner.spread(CPU),
            "over_floor": round(runner.over(runners[-1], CPU), 3), "ratio": round(runner.over(runners[0], CPU), 3),
        }
        for runner in runners
    ]  # fmt: skip


def main(
    quick: Quick = False,
    rounds: int = 200,
    output: Output = RESULTS / "step.csv",
) -> None:
    """Time one token."""
    torch.set_num_threads(1)
    log = Log(output)
    for family, (K, V) in itertools.product(FAMILY, SIZES):
        log.add(measure(family, K, V, 5 if quick else rounds))
    lines = [
        [f"{x['family']}: {x['runner']}", f"{x['K']}×{x['V']}", f"[bold]{x['over_floor']:.2f}[/]", f"{x['ratio']:.2f}",
         f"{x['us_per_layer']:.1f} ±{x['spread']:.0%}"]
        for x in log.rows
    ]  # fmt: skip
    show(f"one token of a layer, {LAYERS} layers in turn", ["", "K×V", "over the floor", "over ours", "µs"], lines)
    log.end()


if __name__ == "__main__":
    typer.run(main)
