"""A language model as one ONNX graph: tokens and the states before them -> logits and the states after them.

Dimensions: B batch, T tokens.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..extra.latent import LatentAttention
from ..hf.model import HeadraceForCausalLM
from ..layers.attention.attention import SoftmaxAttention
from ..layers.base import ANY, INTEGERS, Mixer
from ..layers.blocks.moe import MixtureOfExperts
from ..layers.linear.mixer import LinearMixer
from ..utils.errors import InputError

OPSET = 23  # the first with RMSNormalization
FIELDS = {  # of a layer's state
    LinearMixer: ("memory", "conv", "shift", "tokens"), SoftmaxAttention: ("k", "v"), LatentAttention: ("k", "v"),
}  # fmt: skip
TRACED = {"batch": 2, "tokens": 6, "past": 3}  # sizes while the graph is traced; 0 and 1 would become constants
PARTS = {"shared": "a block that several layers share", "positions": "absolute positions"}


class State(NamedTuple):
    """One tensor of the states. A dimension is a size, or the name of one that varies."""

    name: str  # "<layer>.<field>": the graph's input is past.<name>, its output present.<name>
    shape: tuple[int | str, ...]
    dtype: torch.dtype

    def zeros(self, **sizes: int) -> Tensor:
        """Returns zeros, which with past=0 are the state before the first token. sizes: batch and past."""
        return torch.zeros([sizes[n] if isinstance(n, str) else n for n in self.shape], dtype=self.dtype)


def states(model: HeadraceForCausalLM) -> list[State]:
    """Returns the states of a model, in the order of the graph's inputs and outputs."""
    tensors = []
    for i, layer in enumerate(model.model.backbone.layers):
        for field in _fields(layer.mixer):
            sizes: Any = layer.mixer.state_shapes[field]  # type: ignore[index, union-attr]
            shape = ("batch", *("past" if n == ANY else n for n in sizes))
            tensors.append(State(f"{i}.{field}", shape, torch.int64 if field in INTEGERS else torch.float32))
    return tensors


def _fields(mixer: Any) -> list[str]:
    return [name for name in FIELDS[type(mixer)] if name in mixer.state_shapes]


def check_exportable(model: HeadraceForCausalLM) -> None:
    """Raises InputError for a model that ONNX's nodes cannot express, with the first part that they cannot."""
    for i, layer in enumerate(model.model.backbone.layers):
        if (reason := _reason(layer)) is not None:
            raise InputError(f"--to onnx cannot write layer {i} of the model: {reason}")
    for name, what in PARTS.items():
        if getattr(model.model.backbone, name) is not None:
            raise InputError(f"--to onnx cannot write a model with {what}; expected linear mixers or softmax attention")


def _reason(layer: Any) -> str | None:
    """Returns why a layer cannot be exported, or None."""
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mlp, MixtureOfExperts):
        return "it has a mixture of experts, which chooses the weights of each token"
    if layer.parallel is not None or isinstance(mlp, Mixer):
        return "it has several states; expected one mixer and an MLP without a state"
    if type(mixer) not in FIELDS:
        return f"its mixer is {type(mixer).__name__}, whose recurrence has no node in ONNX; expected a linear mixer"
    if isinstance(mixer, LinearMixer):
        if mixer.general is not None:
            return f"its delta rule (write.erase={mixer.spec.write.erase}) has no node in ONNX"
        if mixer.spec.write.beta in ("exp", "trapezoid") or mixer.spec.inputs.turns:
            return f"write.beta={mixer.spec.write.beta!r} and inputs.turns={mixer.spec.inputs.turns} are not written"
        chunks = "its write strength β (write.residual_chunk) is computed in a loop over chunks"
        return None if mixer.residual is None else chunks
    if mixer.spec.rotary and mixer.spec.rope.by_length:
        return f"its rotary frequencies (rope.kind={mixer.spec.rope.kind!r}) depend on the length of the sequence"
    if mixer.spec.forget:
        return "its softmax attention forgets (forget=True), by sums in float64"
    dense = mixer.spec.pattern is None and mixer.spec.form != "tiles"
    return None if dense else "its softmax attention is sparse or tiled; expected dense attention"


class Pass(nn.Module):
    """What the graph computes: (input_ids [B, T], states before) -> (logits [B, T, vocabulary], states after)."""

    def __init__(self, model: HeadraceForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        mixers: Any = [layer.mixer for layer in self.model.model.backbone.layers]
        remaining = iter(past)
        before = [mixer.state_kind(**{name: next(remaining) for name in _fields(mixer)}) for mixer in mixers]
        x, after = self.model.model.backbone(self.model.model.embed_tokens(input_ids), before)
        present = [getattr(state, name) for mixer, state in zip(mixers, after, strict=True) for name in _fields(mixer)]
        return self.model.logits(x), present


def trace(model: HeadraceForCausalLM) -> Any:
    """Returns the `torch.onnx.ONNXProgram` of a model, for any batch size and number of tokens from 1."""
    state_tensors = states(model)
    ids = torch.ones(TRACED["batch"], TRACED["tokens"], dtype=torch.long)
    varying = [{i: n for i, n in enumerate(state.shape) if isinstance(n, str)} for state in state_tensors]
    with silent(), torch.no_grad():
        program: Any = torch.onnx.export(
            Pass(model), (ids, [state.zeros(**TRACED) for state in state_tensors]), dynamo=True, verbose=False,
            opset_version=OPSET, dynamic_shapes=({0: "batch", 1: "tokens"}, varying),
            input_names=["input_ids", *(f"past.{state.name}" for state in state_tensors)],
            output_names=["logits", *(f"present.{state.name}" for state in state_tensors)],
            custom_translation_table={torch.ops.aten.log_sigmoid.default: _log_sigmoid},
        )  # fmt: skip
    for state, output in zip(state_tensors, program.model.graph.outputs[1:], strict=True):
        if "past" not in state.shape:  # traced as a function of `tokens`, from which the end of a longer tensor is cut
            output.shape = type(output.shape)(state.shape)
    for node in program.model.graph:  # stack traces, with paths of this machine
        node.metadata_props.clear()
    return program


@contextmanager
def silent() -> Iterator[None]:
    """Suppresses what other packages say about their own code, and about packages that are not needed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _log_sigmoid(x: Any) -> Any:
    """−log(1 + e^−x). The exporter's log(σ(x)) loses the digits of results near 0, as those of slow decays are."""
    from onnxscript import opset18 as op

    return op.Neg(op.Softplus(op.Neg(x)))
