"""The step of `generate` as a CUDA graph, which the next generation of the same kind replays again.

Dimensions: B batch, T tokens.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.blocks.moe import MixtureOfExperts
from ..layers.graph import GraphedStep
from ..spec.record import Record
from ..utils.errors import InputError
from .cache import HeadraceCache
from .decoding import Choice, decode_loop, token_loop
from .marks import copied

OWN = frozenset(vars(nn.Module()))  # what PyTorch keeps in every module
HOOKS = "_forward_hooks", "_forward_pre_hooks"
SCALARS = bool, int, float, str, torch.dtype, type(None), Record


def unsupported_reason(model: Any, cache: HeadraceCache | None = None) -> str | None:
    """Returns why a token of a model, and of its cache, is not computed by a CUDA graph, or None."""
    if cache is not None and cache.makes_marks:
        return "the last generation's cache made marks between tokens"
    if (kind := model.device.type) != "cuda":
        return f"the model is on {kind}"
    if len(devices := {str(x.device) for x in model.parameters()}) > 1:
        return f"its weights are on {', '.join(sorted(devices))}"
    backbone = model.model.backbone
    if backbone.positions is not None and backbone.positions.table is not None:
        return "its positions are learned, and have an end"
    for i, layer in enumerate(backbone.layers):
        if not layer.recurrent:
            return f"the state of layer {i} grows with the tokens"
        if isinstance(layer.mlp, MixtureOfExperts):
            return f"layer {i} is a mixture of experts, whose sizes depend on the tokens"
    for name, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in HOOKS):
            return f"{name or 'the model'} has a hook"
    return None


class Graph(NamedTuple):
    """A captured step: tokens [B] -> the next tokens [B], or with choice=None their logits [B, 1, vocabulary]."""

    key: Any
    step: GraphedStep | None  # None: the capture failed
    choice: Choice | None
    failure: str | None = None


class Graphs:
    """The CUDA graph of a model's last generation, with its memory; and why the last generation had none."""

    def __init__(self) -> None:
        self.kept: Graph | None = None
        self.refused: str | None = None

    def __reduce__(self) -> Any:
        return Graphs, ()

    def continued(
        self, model: Any, cache: HeadraceCache, ids: Tensor, logits: Tensor, choice: Choice, streamer: Any,
        required: bool,
    ) -> Tensor:  # fmt: skip
        """Continues ids [B, T], of which the cache has read all, with logits [B, 1, vocabulary] of the next token. The
        states of the cache are those before and after the generation; meanwhile the graph has its own.

        required: raise InputError where the step cannot be captured, in place of a warning and a loop without a
            graph."""
        with self._lent(model, cache.states, ids, choice) as graph:
            self.refused = graph.failure
            if required and graph.failure:
                raise InputError(f"expected a CUDA graph, and {graph.failure}")
            if graph.step is None:
                return decode_loop(ids, logits, partial(model.engine.step, model, cache=cache), choice, streamer)
            reading = Reading(graph.step, cache, ids, None if graph.choice else choice)
            choice = graph.choice or choice
            try:
                return token_loop(ids, choice(ids, logits), reading.advance, choice, streamer)
            finally:
                reading.end()

    @contextmanager
    def _lent(self, model: Any, states: Any, ids: Tensor, choice: Choice) -> Iterator[Graph]:
        """The graph that is kept, or a new one. Another thread that generates meanwhile captures its own."""
        key = len(ids), choice.key, fingerprint(model)
        kept, self.kept = self.kept, None
        if kept is None or kept.key != key:
            del kept  # its memory is free for the new one
            kept = capture(key, model, states, ids[:, -1], choice)
        elif kept.step is not None:
            kept.step.load(states)
        if kept.choice is not None:
            kept.choice.restart()
        yield kept
        self.kept = kept


class Reading:
    """The states of a graph while it reads tokens. choice: what chooses from its logits; None: it gives tokens."""

    def __init__(self, step: GraphedStep, cache: HeadraceCache, ids: Tensor, choice: Choice | None):
        self.step, self.cache, self.ids, self.choice, self.start = step, cache, ids, choice, ids.shape[1]

    def advance(self, ids: Tensor, token: Tensor) -> Tensor:
        result = self.step(token)
        self.ids = ids
        return result if self.choice is None else self.choice(ids, result)

    def end(self) -> None:
        """Gives the cache a copy of the states."""
        if new := self.ids.shape[1] - self.start:
            self.cache.replace([copied(state) for state in self.step.states], new, self.ids[:, self.start :])


def capture(key: Any, model: Any, states: Any, token: Tensor, choice: Choice) -> Graph:
    """Captures the step of a model, with the choice of the next token if it depends on the logits alone."""
    included = choice if key[1] is not None else None

    def step(token: Tensor, states: Any) -> tuple[Tensor, Any]:
        x, states = model.model.backbone(model.model.embed_tokens(token[:, None]), states, in_place=True)
        logits = model.logits(x)
        return logits if included is None else included(None, logits), states

    kind, devices = token.device.type, [token.device] if token.is_cuda else []
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    # The memory of the graph serves generations with and without inference mode. The capture draws no random numbers,
    # and reads no weights that autocast has cast and will free.
    with (
        torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices),
        torch.autocast(kind, dtype, enabled, cache_enabled=False),
    ):  # fmt: skip
        own = [copied(state, contiguous) for state in states]
        try:
            return Graph(key, GraphedStep(step, token.clone(), own), included)
        except (InputError, RuntimeError) as error:
            failure = f"the step cannot be captured: {str(error).partition(chr(10))[0]}"
    warnings.warn(f"generation without a CUDA graph: {failure}", stacklevel=2)
    return Graph(key, None, None, failure)


def contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What a captured step depends on besides the numbers in its weights: the memory of all tensors, the modules and
    their settings, and PyTorch's own."""
    modes = torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return *modes, *(entry for module in model.modules() for entry in _of(module))


def _of(module: nn.Module) -> Iterator[Any]:
    yield type(module)
    yield module.training
    yield module._compiled_call_impl is None
    for x in (*module._parameters.values(), *module._buffers.values()):
        if x is not None:
            yield x.data_ptr(), x.shape, x.stride(), x.dtype, x.device
    for name, value in vars(module).items():
        if name not in OWN and isinstance(value, SCALARS):
            yield name, value
