"""One token of a linear mixer in one call of a backend, from its input projection to its output projection.

The call overwrites the state, so it runs only with `in_place=True`.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.attention import linear_attention
from ...ops.backends.base import LayerStep
from ...ops.call import NORMALISER_EPS
from ...ops.derivatives import has_address, transformed
from ...ops.dispatch import BACKENDS
from ...ops.modules import is_plain
from ...spec.decay import Decay
from ...spec.linear import Competition, Inputs, MixerSpec, Read
from ...utils.errors import InputError
from ..base import check_state, may_write
from .readout import GROUP_NORM_EPS


class MixerState(NamedTuple):
    """The recurrent state of N sequences; None for parts that the spec does not have."""

    memory: Tensor  # [N, H, K, V]
    conv: Tensor | None = None  # [N, width − 1, channels], the last inputs of the short convolution
    shift: Tensor | None = None  # [N, 1, D], the last input of the token shift
    tokens: Tensor | None = None  # [N], number of tokens so far, for rotary positions and write.residual_chunk
    before: Tensor | None = None  # [N, H, K, V], the memory before the current chunk, decayed, for write.residual_chunk


# Paths of the weights in a LinearMixer, in the order of the call; the first path that exists counts.
PLACES = {
    "conv_weight": ["conv.weight"],
    "conv_bias": ["conv.bias"],
    "decay_up": ["decay.up.weight", "decay.up"],
    "decay_bias": ["decay.up.bias", "decay.dt_bias", "decay.bias"],
    "decay_log": ["decay.A_log"],
    "bonus": ["bonus"],
    "read_scores": ["read_competition.weight"],
    "write_scores": ["write_competition.weight"],
    "skip": ["skip"],
    "gate_up": ["gate.up.weight"],
    "gate_bias": ["gate.up.bias"],
    "norm_weight": ["norm_weight"],
    "norm_bias": ["norm_bias"],
}


class FusedStep:
    """One token of one LinearMixer in one call: the layer for each backend that has such calls, and the paths of its
    weights."""

    def __init__(self, mixer: Any):
        spec, parts, gate = mixer.spec, mixer.parts, mixer.spec.competition or Competition()
        sizes = [
            mixer.in_proj.in_features, mixer.H, mixer.Hq, mixer.K, mixer.V, spec.inputs.conv, parts.get("decay", 0),
            parts.get("gate", 0),
        ]  # fmt: skip
        numbers = [
            1.0 if spec.read.scale == "one" else mixer.K**-0.5, mixer.norm_eps, GROUP_NORM_EPS, NORMALISER_EPS,
            gate.temperature, mixer.rope_theta if spec.inputs.rotary else 0.0,
        ]  # fmt: skip
        paths = {n: next((p for p in places if isinstance(_at(mixer, p), Tensor)), "") for n, places in PLACES.items()}
        paths = {name: path for name, path in paths.items() if path}
        self._inside = _inside(mixer, list(paths.values()))
        self._settings, self._count = _settings(mixer), len(paths)
        self.layers: dict[str, LayerStep] = {
            name: backend.layer_step(_kinds(spec), sizes, numbers, list(paths))
            for name, backend in BACKENDS.items() if backend.layer_step is not None
        }  # fmt: skip
        self._reads_input = gate.source == "hidden" and spec.competition is not None

    def find(self, mixer: Any, x: Tensor, weights: list[Any] | None) -> tuple[LayerStep | None, str | None]:
        """Returns (the layer of the first backend that can compute x [B, T, D] in one call, None), or (None, why there
        is none). weights: from `self.weights`.

        Raises InputError for a weight whose shape is not the layer's."""
        if x.shape[1] != 1:
            return None, "it takes one token of each sequence"
        if torch.is_grad_enabled():
            return None, "it has no gradient: torch.no_grad() is needed"
        if mixer.op is not linear_attention:
            return None, "the mixer has another `op`"
        if weights is None:
            return None, "a weight, a module or a setting of the mixer was replaced, or a module has a hook"
        if transformed() or not has_address(x):
            return None, f"it reads memory by address, and x is under a transform or a {type(x).__name__}"
        reason: str | None = "no backend computes a layer's token in one call"
        for name, layer in self.layers.items():
            if mixer.backend == "auto" and BACKENDS[name].on_request:
                continue
            if mixer.backend not in ("auto", name):
                reason = f"the layer's backend is {mixer.backend}"
            elif (reason := layer.unsupported_reason(x, weights)) is None:
                return layer, None
        return None, reason

    def weights(self, mixer: Any) -> list[Any] | None:
        """Returns the weights of the call, or None if one is not a plain parameter of its module any more, or if the
        call would compute something else than the mixer's modules. (Reads the modules' dictionaries, because attribute
        access of an nn.Module is slow.)"""
        if _settings(mixer) != self._settings:
            return None
        tensors: list[Any] = [None] * self._count
        for parents, kind, weights in self._inside:
            module = mixer
            for parent in parents:
                if (module := module._modules.get(parent)) is None:
                    return None
            if parents and not is_plain(module, kind):
                return None
            for place, name in weights:
                weight = module._parameters.get(name)
                if type(weight) is not nn.Parameter:
                    return None
                tensors[place] = weight
        return tensors

    def writable(self, layer: LayerStep, state: Any, mixer: Any, x: Tensor) -> MixerState:
        """Returns a state that the call may overwrite: the state itself, or copies if a tensor has another dtype, is
        not contiguous or is needed by autograd. Raises InputError for a state of another mixer or batch size."""
        if not isinstance(state, MixerState) or not (state.shift is state.before is mixer.shift):
            check_state(state, MixerState, mixer.state_shapes, x, x.shape[0])
        given = state.memory, state.conv, state.tokens
        if layer.fits(given, x) and may_write(given):
            return state
        check_state(state, MixerState, mixer.state_shapes, x, x.shape[0])
        named = zip(given, layer.state(x.shape[0], x.dtype), strict=True)
        copies = {name: y.new_empty(shape or (), dtype=d).copy_(y) for y, (shape, d, name) in named if y is not None}
        return state._replace(**copies)

    def run(self, layer: LayerStep, weights: Any, projected: Tensor, x: Tensor, state: MixerState) -> Tensor:
        """Computes the output [B, H V] before the output projection, and updates `state`.

        Args:
            layer: from `self.find`.
            weights: from `self.weights`.
            projected: [B, parts], the input projection of x.
            x: the layer's input [B, 1, D].
            state: from `self.writable`.

        Raises:
            InputError: if a tensor of the state shares memory with another argument.
        """
        hidden = x[:, 0].contiguous() if self._reads_input else None
        token = projected.contiguous(), hidden
        try:
            return layer.run(weights, token, (state.memory, state.conv, state.tokens))
        except ValueError as error:
            raise InputError(str(error)) from None


def _kinds(spec: MixerSpec) -> dict[str, str]:
    """Returns the kinds of a spec's parts by the parts' names."""
    beta = spec.write.beta if spec.write.residual_chunk is None else "sigmoid with write.residual_chunk"
    gate = spec.competition
    read, write = (gate.read, gate.write) if gate else ("none", "none")
    gate = gate or Competition()
    known = gate.range == Competition.range and not gate.shuffle
    return {
        "feature_map": _feature_map(spec.inputs), "qk_norm": spec.inputs.qk_norm, "decay": _decay(spec.decay),
        "rule": spec.write.rule, "beta": beta, "norm": _norm(spec.read), 
        "gate": spec.read.gate if spec.read.gate_bias else f"{spec.read.gate} without a bias",
        "order": spec.read.order, "read": read, "write": write,
        "source": gate.source if gate.memories_per_head == 1 else f"{gate.memories_per_head} memories of each head",
        "activation": gate.activation if known else f"{gate.activation} of range {gate.range}, shuffle={gate.shuffle}",
        "gate_scale": gate.scale,
    }  # fmt: skip


def _feature_map(inputs: Inputs) -> str:
    """The feature map, with what else is done to q, k and v that no call computes."""
    more = {
        "after the rotation": inputs.rotary_first, f"of order {inputs.order}": inputs.order is not None,
        "with inputs.value_gate": inputs.value_gate, "with inputs.by_length": inputs.by_length,
        "with inputs.value_map": inputs.value_map != "identity",
    }  # fmt: skip
    return " ".join([inputs.feature_map, *(words for words, applies in more.items() if applies)])


def _decay(decay: Decay) -> str:
    """The decay, with what no call computes of it."""
    more = {
        "of full rank": decay.rank == "full", "with decay.lower_bound": decay.lower_bound is not None,
        "with bounds of dt": decay.limited,
    }  # fmt: skip
    return " ".join([decay.kind, *(words for words, applies in more.items() if applies)])


def _norm(read: Read) -> str:
    """The norm, with what no call computes of it."""
    other = replace(read, affine=None).weighted != read.weighted
    more = {f"with read.affine={read.affine}": other, "with read.by_length": read.by_length}
    return " ".join([read.norm, *(words for words, applies in more.items() if applies)])


OUTSIDE = "in_proj", "o_proj", "shift"  # modules that the layer calls before and after the fused step


def _inside(mixer: nn.Module, paths: list[str]) -> list[tuple[list[str], type, list[tuple[int, str]]]]:
    """Returns the mixer and its modules that a fused step stands for: the path of each, its class, and the names of its
    weights with their places in `paths`."""
    modules = []
    for name, module in mixer.named_modules():
        if name in OUTSIDE:
            continue
        own = [(i, path.rpartition(".")[2]) for i, path in enumerate(paths) if path.rpartition(".")[0] == name]
        modules.append((name.split(".") if name else [], type(module), own))
    return modules


def _settings(mixer: Any) -> tuple[float, float]:
    """Returns the settings of a mixer that a fused step is made with."""
    return mixer.norm_eps, mixer.rope_theta


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
