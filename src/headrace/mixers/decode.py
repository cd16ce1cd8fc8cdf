"""A token of a linear mixer in one native call, from its input projection to its output projection.

It writes into the state it is given, so it runs only where the state's holder allows that, by `in_place=True`.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import native, native_layer
from ..backends.derivatives import has_address, transformed
from ..errors import InputError
from ..recurrence import NORMALISER_EPS, linear_attention
from ..spec import Competition, MixerSpec
from .base import may_write

GROUP_NORM_EPS = 64e-5  # RWKV-6's: 1e-5 times its head size divisor squared


class MixerState(NamedTuple):
    """What a sequence carries on; None where the spec has no such part. N sequences come first."""

    memory: Tensor  # [N, H, K, V]
    conv: Tensor | None = None  # [N, width − 1, channels]
    shift: Tensor | None = None  # [N, 1, D]
    tokens: Tensor | None = None  # [N], how many were seen, for rotary and chunks that are counted
    before: Tensor | None = None  # [N, H, K, V], the memory before the present chunk, for a β that sees it


# Where a mixer keeps what the native call takes, in its order: the first of these that is there.
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


MOVED = object()


class FusedStep:
    """The native call for one LinearMixer: what it is told of the spec, and where the weights are."""

    def __init__(self, mixer: Any):
        spec, parts, gate = mixer.spec, mixer.parts, mixer.spec.competition or Competition()
        kinds, self.unknown = native_layer.numbered(_kinds(spec))
        sizes = [
            mixer.in_proj.in_features, mixer.H, mixer.Hq, mixer.K, mixer.V, spec.inputs.conv, parts.get("decay", 0),
            parts.get("gate", 0),
        ]  # fmt: skip
        numbers = [
            1.0 if spec.read.scale == "one" else mixer.K**-0.5, mixer.norm_eps, GROUP_NORM_EPS, NORMALISER_EPS,
            gate.temperature, mixer.rope_theta if spec.inputs.rotary else 0.0,
        ]  # fmt: skip
        self.layer = native_layer.Layer(kinds, sizes, numbers)
        paths = [next((p for p in places if isinstance(_at(mixer, p), Tensor)), "") for places in PLACES.values()]
        self._places = [(path.split(".")[:-1], path.split(".")[-1]) if path else None for path in paths]
        self._reads_input = gate.source == "hidden" and spec.competition is not None

    def refuses(self, mixer: Any, x: Tensor, weights: list[Any]) -> str | None:
        """Why x [B, T, D] goes through the layer's separate steps, or None. weights: what `self.weights` found."""
        if x.shape[1] != 1:
            return "it takes one token of each sequence"
        if torch.is_grad_enabled():
            return "it has no gradient: torch.no_grad() is needed"
        if x.device.type != "cpu" or x.dtype not in native.DTYPES:
            return f"it runs on the CPU, in float32 and bfloat16; x is {x.dtype} on {x.device.type}"
        if native.missing or self.unknown:
            return native.missing or self.unknown
        if mixer.op is not linear_attention:
            return "the mixer has an `op` of its own"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        if transformed() or not has_address(x):
            return f"it reads memory, and x is transformed or a {type(x).__name__}"
        if not all(w is None or _as_is(x.dtype, w) for w in weights):
            return f"not all weights are contiguous and {x.dtype}, as x is, and where they were"
        return None

    def weights(self, mixer: Any) -> list[Any]:
        """In the order of PLACES: None where the layer has no such part, MOVED where a module was replaced by another
        kind of module. (An nn.Module's attributes are slow.)"""
        found: list[Any] = []
        for place in self._places:
            if place is None:
                found.append(None)
                continue
            module = mixer
            for parent in place[0]:
                module = module._modules[parent]
            found.append(module._parameters.get(place[1], MOVED))
        return found

    def run(self, weights: list[Any], projected: Tensor, x: Tensor, state: MixerState) -> Tensor:
        """projected [B, parts], all that the input projection makes of x [B, 1, D] -> [B, H V]. The state is what
        `writable` made of the layer's."""
        hidden = x[:, 0].contiguous() if self._reads_input else None
        tensors = projected.contiguous(), hidden, weights, state.memory, state.conv, state.tokens
        try:
            return native_layer.run(self.layer, *tensors)
        except ValueError as error:
            raise InputError(str(error)) from None


def writable(state: MixerState, dtype: torch.dtype) -> MixerState:
    """The state in the form that a native call for activations of this dtype writes into: itself, unless a tensor
    has another dtype, is no dense block of memory, or belongs to autograd; such a tensor is copied."""
    memory, conv, tokens = (
        _writable(x, wanted)
        for x, wanted in ((state.memory, torch.float32), (state.conv, dtype), (state.tokens, torch.int64))
    )
    if memory is state.memory and conv is state.conv and tokens is state.tokens:
        return state
    return state._replace(memory=memory, conv=conv, tokens=tokens)


def _writable(x: Any, dtype: torch.dtype) -> Any:
    if x is None or (x.dtype is dtype and x.is_contiguous() and may_write(x)):
        return x
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format).copy_(x)


def _as_is(dtype: torch.dtype, weight: Any) -> bool:
    return has_address(weight) and weight.dtype is dtype and weight.is_contiguous()


def _kinds(spec: MixerSpec) -> dict[str, str]:
    """The names of a spec's kinds, by those that the native library has for them."""
    beta = spec.write.beta if spec.write.look is None else "of what memory lacks"
    gate = spec.competition
    read, write = (gate.read, gate.write) if gate else ("none", "none")
    gate = gate or Competition()
    return {
        "feature_map": spec.inputs.feature_map, "qk_norm": spec.inputs.qk_norm, "decay": spec.decay.kind,
        "rule": spec.write.rule, "beta": beta, "norm": spec.read.norm, "gate": spec.read.gate,
        "order": spec.read.order, "read": read, "write": write,
        "source": gate.source if gate.rank == 1 else f"{gate.rank} memories of each head",
        "activation": gate.activation, "gate_scale": gate.scale,
    }  # fmt: skip


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
