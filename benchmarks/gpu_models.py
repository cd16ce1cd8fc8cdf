"""Whole models on a GPU: training steps and decoding. See gpu.py."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from importlib import import_module
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_measure import Machine
from gpu_sizes import Found, Sizes, failure
from headrace import set_backend, zoo
from headrace.layers import build
from headrace.layers.blocks.stack import Backbone
from headrace.layers.blocks.stack import Sizes as StackSizes
from headrace.layers.blocks.widths import default_intermediate_size
from headrace.layers.graph import GraphedStep
from headrace.studies.verify import relative, worst


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


FLA_LAYER = "fla layer"  # in the place of headrace's backends


class Model(nn.Module):
    """A language model of one mixer: embedding, blocks, and the embedding again as the head. way: a backend of
    headrace, or "fla layer"."""

    def __init__(self, mixer: str, sizes: Sizes, way: str):
        super().__init__()
        stack = StackSizes(sizes.hidden, 4, default_intermediate_size(sizes.hidden))
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.backbone = Backbone([zoo.mixer(mixer)] * sizes.layers, stack)
        if way == FLA_LAYER:
            kind, options = FLA_LAYERS[mixer]
            for block in self.backbone.layers:
                block.mixer = FlaLayer(getattr(import_module("fla.layers"), kind)(hidden_size=sizes.hidden, **options))
        set_backend(self.backbone, "triton" if way == FLA_LAYER else way)  # so that only the mixer differs

    def loss(self, ids: Tensor) -> Tensor:
        x, _ = self.backbone(self.embedding(ids))
        return F.cross_entropy((x @ self.embedding.weight.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ways(machine: Machine) -> tuple[str, ...]:
    """Returns the backends to time: that of "auto", and on a GPU headrace's kernels, which "auto" does not choose."""
    return ("auto", "triton") if machine.is_gpu else ("auto",)


def layers(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Errors of a layer's output and gradients in bfloat16 against PyTorch in float64 on the same numbers, and what a
    forward and backward take of the host."""
    T = sizes.batch[1]
    where = f"hidden {sizes.hidden}, B=1 T={T}"
    for mixer in sizes.mixers:
        layer = build(zoo.get(mixer), hidden_size=sizes.hidden, num_heads=4).to(machine.device, torch.bfloat16)
        for gate in (layer.read_competition, layer.write_competition):
            if gate is not None:
                nn.init.normal_(gate.weight, std=0.1)
        x = torch.randn(1, T, sizes.hidden, dtype=torch.bfloat16, device=machine.device, requires_grad=True)
        exact = deepcopy(layer).double()
        exact.backend = "torch"
        truth = [y.cpu() for y in passed(exact, x.detach().double().requires_grad_())]
        for way in ways(machine):
            layer.backend, subject = way, f"{mixer} | {way}"
            try:
                output, *gradients = passed(layer, x)
                times = machine.interleave({mixer: partial(passed, layer, x)}, sizes.rounds, sizes.budget)[mixer]
                launches = machine.launches(partial(passed, layer, x))
            except Exception as error:
                yield failure(subject, where, error)
                continue
            yield subject, where, "layer's output", relative(output, truth[0]), "relative", ""
            yield subject, where, "layer's gradients", worst(gradients, truth[1:]), "relative", ""
            yield subject, where, "host", times.host, "ms", ""
            yield subject, where, "launches", float(launches), "", ""


def passed(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients to x and to all parameters of its sum."""
    y, _ = layer(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])]


def train(machine: Machine, sizes: Sizes) -> Iterator[Found]:
    """Tokens per second of whole training steps in bfloat16, one model at a time."""
    B, T = sizes.batch
    subjects = [(name, way) for way in ways(machine) for name in sizes.mixers]
    subjects += [(name, FLA_LAYER) for name in sizes.mixers if name in FLA_LAYERS and machine.is_gpu]
    for mixer, way in subjects:
        subject, where = f"{mixer} | {way}", f"{sizes.layers} layers, B={B} T={T}"
        try:
            model = Model(mixer, sizes, way).to(machine.device, torch.bfloat16)
            ids = torch.randint(sizes.vocabulary, (B, T), device=machine.device)
            optimizer = torch.optim.AdamW(model.parameters(), fused=machine.is_gpu)
            call = partial(training_step, model, optimizer, ids)
            times = machine.interleave({mixer: call}, min(sizes.rounds, 10), 4 * sizes.budget)[mixer]
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
    """Tokens per second after a context of 64 tokens, token by token, without and with a CUDA graph."""
    for mixer, way in ((name, way) for way in ways(machine) for name in sizes.mixers):
        model = Model(mixer, sizes, way).to(machine.device, torch.bfloat16).eval()
        for B, graphed in product(sizes.streams, (False, True) if machine.is_gpu else (False,)):
            subject, where = f"{mixer} | {way}{' | CUDA graph' * graphed}", f"{sizes.layers} layers, B={B}"
            x = torch.randn(B, 64, sizes.hidden, dtype=torch.bfloat16, device=machine.device)
            try:
                call = token_by_token(model, x, graphed)
                times = machine.interleave({mixer: call}, sizes.rounds, sizes.budget)[mixer]
                launches = machine.launches(call)
            except Exception as error:
                yield failure(subject, where, error)
                continue
            yield subject, where, "decoding", 1000 * B / times.device, "tokens/s", ""
            yield subject, where, "host", times.host, "ms", ""
            yield subject, where, "launches", float(launches), "", ""


def token_by_token(model: Model, x: Tensor, graphed: bool) -> Callable[[], object]:
    """Returns a call that computes the token after x [B, T, D], which may overwrite the states."""
    _, states = model.backbone(x)

    def step(x: Tensor, states: list) -> tuple[Tensor, list]:
        y, states = model.backbone(x, states, in_place=True)
        return (y @ model.embedding.weight.T).argmax(-1), states

    token = x[:, :1]
    return partial(GraphedStep(step, token, states), token) if graphed else partial(step, token, states)
