"""The stages of gpu.py. A stage yields (subject, shape, measure, value, unit, note) as soon as it is known."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_measure import Call, Machine
from headrace import InputError, backends, linear_attention, zoo
from headrace.layers.stack import Backbone, default_intermediate_size
from headrace.layers.stack import Sizes as StackSizes
from headrace.ops.dispatch import BACKENDS
from headrace.ops.reference import literal
from headrace.studies.verify import relative, worst
from peers import FAMILIES, Family

Found = tuple[str, str, str, float, str, str]  # subject, shape, measure, value, unit, note


class Sizes(NamedTuple):
    """The sizes of all stages. A shape of the op is (B, T, H, K, V)."""

    copied: int  # numbers
    square: int  # rows of a square matrix
    correct: tuple[tuple[int, int, int, int, int], ...]
    timed: tuple[tuple[int, int, int, int, int], ...]
    families: tuple[str, ...]
    mixers: tuple[str, ...]
    layers: int
    hidden: int
    vocabulary: int
    batch: tuple[int, int]  # B and T of a training step
    streams: tuple[int, ...]  # sequences that are decoded at once
    rounds: int
    budget: float  # seconds for the rounds of one call


ALL = "scalar", "gated-delta", "vector", "linear", "kda", "delta", "fixed", "bonus"
FULL = Sizes(
    2**30, 8192, ((2, 512, 4, 128, 128), (1, 512, 4, 256, 256)),
    ((8, 4096, 8, 128, 128), (8, 4096, 4, 256, 256)), ALL,
    ("gla", "softmax-gla", "gated-deltanet", "softmax-gated-deltanet", "retnet", "softmax-retnet"),
    24, 1024, 32_000, (4, 4096), (1, 64), 20, 1.0,
)  # fmt: skip
DRY = Sizes(
    2**12, 32, ((1, 70, 2, 16, 16),), ((1, 70, 2, 16, 16),), ALL, ("gla", "softmax-gla"), 1, 32, 64, (1, 70), (1,), 1,
    1.0,
)  # fmt: skip


def failure(subject: str, shape: str, error: Exception) -> Found:
    return subject, shape, "failed", 1.0, "", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"


# --- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """The rates that nothing can exceed: of copying, of a product of matrices, of launches."""
    x = torch.zeros(sizes.copied, dtype=torch.bfloat16, device=machine.device)
    a = torch.randn(sizes.square, sizes.square, dtype=torch.bfloat16, device=machine.device)
    small, y = torch.zeros(1, device=machine.device), torch.empty_like(x)
    calls: dict[str, Call] = {"copy": lambda: y.copy_(x), "product": lambda: a @ a, "launch": lambda: small.add_(1)}
    times = machine.race(calls, sizes.rounds, sizes.budget)
    shape = "bfloat16"
    yield "machine", shape, "copy", 2 * x.nbytes / times["copy"].device / 1e6, "GB/s", ""
    yield "machine", shape, "product", 2 * sizes.square**3 / times["product"].device / 1e9, "TFLOP/s", ""
    yield "machine", shape, "launch", 1000 * times["launch"].host, "µs", ""


# --- the op ----------------------------------------------------------------------------------------------------------


def tensors_of(family: Family, shape: tuple[int, ...], machine: Machine) -> dict[str, Tensor]:
    B, T, H, K, V = shape
    return family.inputs(B=B, T=T, H=H, K=K, V=V, dtype=torch.bfloat16, device=machine.device)


def engines(
    family: Family, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]], str]]:
    """(name, call, why it is refused) of every backend that is here."""
    for name, backend in BACKENDS.items():
        if backend.missing() is None:
            call = partial(linear_attention, **tensors, **family.options(), backend=name)
            try:
                backends(**tensors, **family.options(), backend=name)
                yield name, call, ""
            except InputError as error:
                yield name, call, str(error)


def both_ways(call: Callable[[], Any], inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The gradients of a weighted sum of what the call returns."""
    return list(torch.autograd.grad(list(call()), inputs, weights, allow_unused=True, materialize_grads=True))


def correctness(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Errors in bfloat16 against the literal loop in float64 on the same numbers."""
    for shape in sizes.correct:
        for name in sizes.families:
            family, where = FAMILIES[name], f"{name} {list(shape)}"
            tensors = tensors_of(family, shape, machine)
            inputs = [x for x in tensors.values() if x.requires_grad]
            exact = {key: x.detach().double().requires_grad_(x.requires_grad) for key, x in tensors.items()}
            truth = literal(**exact, **family.options())
            weights = [torch.randn_like(x) for x in truth]
            expected = both_ways(lambda truth=truth: truth, [x for x in exact.values() if x.requires_grad], weights)
            truth = [x.cpu() for x in truth]
            for engine, call, refused in engines(family, tensors):
                if refused:
                    yield engine, where, "refused", 0.0, "", refused
                    continue
                try:
                    found = call()
                    rounded = [w.to(x.dtype) for w, x in zip(weights, found, strict=True)]
                    gradients = both_ways(lambda found=found: found, inputs, rounded)
                    yield engine, where, "output", relative(found[0], truth[0]), "relative", ""
                    yield engine, where, "state", relative(found[1], truth[1]), "relative", ""
                    yield engine, where, "gradients", worst(gradients, [x.cpu() for x in expected]), "relative", ""
                except Exception as error:  # one kernel's failure must not end the run
                    yield failure(engine, where, error)


def flash_qla(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    names = {"log_decay": "g"}
    function = import_module("flash_qla").chunk_gated_delta_rule
    return function(**{names.get(key, key): x for key, x in tensors.items()}, output_final_state=True, auto_cp=True)


PEERS: dict[str, dict[str, Callable]] = {"gated-delta": {"flash_qla": flash_qla}}  # by module


def runners(name: str, tensors: dict[str, Tensor]) -> dict[str, Call]:
    """Ours by backend, without and with gates, and peers that can be imported."""
    family, found = FAMILIES[name], {}
    for engine, call, refused in engines(family, tensors):
        if not refused:
            found[engine] = call
            gates = {f"{way}_gate": torch.rand_like(tensors["v"][..., 0]).requires_grad_() for way in ("read", "write")}
            found[f"{engine}, gates"] = partial(call, **gates)
    for peer, function in PEERS.get(name, {}).items():
        try:
            import_module(peer)
        except ImportError:  # peers are optional; the table shows which ones ran
            continue
        found[peer] = partial(function, tensors)
    return found


def op(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Times, memory and launches of every backend and peer, in turn in one process."""
    for shape in sizes.timed:
        for name in sizes.families:
            tensors, where = tensors_of(FAMILIES[name], shape, machine), f"{name} {list(shape)}"
            calls: dict[str, Call] = {}
            for runner, call in runners(name, tensors).items():
                inputs = [x for x in {**tensors, **getattr(call, "keywords", {})}.values() if isinstance(x, Tensor)]
                inputs = list({id(x): x for x in inputs if x.requires_grad}.values())
                try:
                    weights = [torch.ones_like(x) for x in call()]
                    calls[runner] = torch.no_grad()(call)
                    calls[f"{runner} | both"] = partial(both_ways, call, inputs, weights)
                    calls[f"{runner} | both"]()
                except Exception as error:
                    calls = {key: x for key, x in calls.items() if not key.startswith(runner)}
                    yield failure(runner, where, error)
            yield from costs(machine, sizes, calls, where)


def costs(machine: Machine, sizes: Sizes, calls: dict[str, Call], where: str) -> Iterator[Found]:
    for key, times in machine.race(calls, sizes.rounds, sizes.budget).items():
        runner, _, way = key.partition(" | ")
        way = "f+b" if way else "fwd"
        yield runner, where, way, times.device, "ms", ""
        yield runner, where, f"{way} host", times.host, "ms", ""
        yield runner, where, f"{way} launches", machine.launches(calls[key]), "", ""
        if (peak := machine.peak(calls[key])) is not None:
            yield runner, where, f"{way} memory", peak / 2**20, "MiB", ""
        try:
            replay = machine.graph(calls[key])
        except Exception as error:  # not every call can be captured
            yield runner, where, f"{way} graph", 0.0, "ms", f"no: {type(error).__name__}"
            continue
        if replay is not None:
            graphed = machine.race({key: replay}, sizes.rounds, sizes.budget)[key]
            yield runner, where, f"{way} graph", graphed.device, "ms", ""


# --- whole models ----------------------------------------------------------------------------------------------------


class FlaLayer(nn.Module):
    """A layer of the package flash-linear-attention in the place of one of headrace's mixers."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state=None, **_) -> tuple[Tensor, None]:
        return self.layer(x)[0], None


FLA_LAYERS = {
    "gla": ("GatedLinearAttention", {"num_heads": 4}),
    "retnet": ("MultiScaleRetention", {"num_heads": 4}),
    "gated-deltanet": ("GatedDeltaNet", {"num_heads": 4, "head_dim": 192}),
}


class Model(nn.Module):
    """A language model of one mixer: embedding, blocks, and the embedding again as the head."""

    def __init__(self, mixer: str, sizes: Sizes, foreign: bool = False):
        super().__init__()
        stack = StackSizes(sizes.hidden, 4, default_intermediate_size(sizes.hidden))
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.backbone = Backbone([zoo.mixer(mixer)] * sizes.layers, stack)
        if foreign:
            kind, options = FLA_LAYERS[mixer]
            layer = getattr(import_module("fla.layers"), kind)
            for block in self.backbone.layers:
                block.mixer = FlaLayer(layer(hidden_size=sizes.hidden, **options))

    def loss(self, ids: Tensor) -> Tensor:
        x, _ = self.backbone(self.embedding(ids))
        return F.cross_entropy((x @ self.embedding.weight.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Tokens per second of whole training steps in bfloat16, one model at a time."""
    B, T = sizes.batch
    subjects = [(name, False) for name in sizes.mixers]
    subjects += [(name, True) for name in sizes.mixers if name in FLA_LAYERS and machine.is_gpu]
    for mixer, foreign in subjects:
        subject, where = f"FLA's {mixer}" if foreign else mixer, f"{sizes.layers} layers, B={B} T={T}"
        try:
            model = Model(mixer, sizes, foreign).to(machine.device, torch.bfloat16)
            ids = torch.randint(sizes.vocabulary, (B, T), device=machine.device)
            optimizer = torch.optim.AdamW(model.parameters(), fused=machine.is_gpu)
            call = partial(training_step, model, optimizer, ids)
            times = machine.race({mixer: call}, min(sizes.rounds, 10), 4 * sizes.budget)[mixer]
        except ImportError as error:
            yield subject, where, "refused", 0.0, "", str(error)
            continue
        except Exception as error:
            yield failure(subject, where, error)
            continue
        yield subject, where, "parameters", float(sum(p.numel() for p in model.parameters())), "", ""
        yield subject, where, "training", 1000 * B * T / times.device, "tokens/s", ""
        if (peak := machine.peak(call)) is not None:
            yield subject, where, "memory", peak / 2**20, "MiB", ""


def training_step(model: Model, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    model.loss(ids).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def decode(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Tokens per second after a context of 64 tokens, token by token, without a CUDA graph."""
    for mixer in sizes.mixers:
        model = Model(mixer, sizes).to(machine.device, torch.bfloat16).eval()
        for B in sizes.streams:
            where = f"{sizes.layers} layers, B={B}"
            x = torch.randn(B, 64, sizes.hidden, dtype=torch.bfloat16, device=machine.device)
            try:
                _, states = model.backbone(x)
                call = partial(decode_token, model, x[:, :1], states)
                times = machine.race({mixer: call}, sizes.rounds, sizes.budget)[mixer]
                launches = machine.launches(call)
            except Exception as error:
                yield failure(mixer, where, error)
                continue
            yield mixer, where, "decoding", 1000 * B / times.device, "tokens/s", ""
            yield mixer, where, "host", times.host, "ms", ""
            yield mixer, where, "launches", float(launches), "", ""


def decode_token(model: Model, x: Tensor, states: list) -> Tensor:
    y, _ = model.backbone(x, states)
    return (y @ model.embedding.weight.T).argmax(-1)


STAGES: dict[str, Callable[[Machine, Sizes], Iterator[Found]]] = {
    "ceilings": ceilings, "correctness": correctness, "op": op, "train": train, "decode": decode,
}  # fmt: skip
