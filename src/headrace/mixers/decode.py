"""A token of a linear mixer in one native call, from its input projection to its output projection.

It writes into the state it is given, so it runs only where the state's owner allows that: see `owned`.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head, N sequences.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import native, native_layer
from ..backends.derivatives import has_address, transformed
from ..recurrence import NORMALISER_EPS, linear_attention
from ..spec import Competition, MixerSpec
from .attention import AttentionState, OwnAttentionState

GROUP_NORM_EPS = 64e-5  # RWKV-6's: 1e-5 times its head size divisor squared


class MixerState(NamedTuple):
    """What a sequence carries on; None where the spec has no such part. N sequences come first."""

    memory: Tensor  # [N, H, K, V]
    conv: Tensor | None = None  # [N, width − 1, channels]
    shift: Tensor | None = None  # [N, 1, D]
    tokens: Tensor | None = None  # [N], how many were seen, for rotary and chunks that are counted
    before: Tensor | None = None  # [N, H, K, V], the memory before the present chunk, for a β that sees it


class OwnState(MixerState):
    """A state that its holder has no other use for: the next token may be written into it."""


OWN: dict[type, Any] = {MixerState: OwnState, AttentionState: OwnAttentionState}


def owned(state: Any) -> Any:
    """A linear mixer's or softmax attention's state, as one that may be written into; any other state as it is.

    Views are copied: the short convolution's is the end of all that went through it."""
    kind = OWN.get(type(state))
    return state if kind is None else kind._make(map(_alone, state))


def _alone(x: Tensor | None) -> Tensor | None:
    if x is None or (x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes):
        return x
    return x.clone(memory_format=torch.contiguous_format)


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


class FusedStep:
    """The native call for one LinearMixer: what it is told of the spec, and where the weights are."""

    def __init__(self, mixer: Any):
        spec, parts, gate = mixer.spec, mixer.parts, mixer.spec.competition or Competition()
        self.kinds, self.unknown = native_layer.numbered(_kinds(spec))
        self.sizes = [
            mixer.in_proj.in_features, mixer.H, mixer.Hq, mixer.K, mixer.V, spec.inputs.conv, parts.get("decay", 0),
            parts.get("gate", 0),
        ]  # fmt: skip
        self.numbers = [
            1.0 if spec.read.scale == "one" else mixer.K**-0.5, mixer.norm_eps, GROUP_NORM_EPS, NORMALISER_EPS,
            gate.temperature, mixer.rope_theta if spec.inputs.rotary else 0.0,
        ]  # fmt: skip
        paths = [next((p for p in places if isinstance(_at(mixer, p), Tensor)), "") for places in PLACES.values()]
        self._filled = [place for place, path in enumerate(paths) if path]
        self._places = [(path.split(".")[:-1], path.split(".")[-1]) for path in paths if path]
        self._reads_input = gate.source == "hidden" and spec.competition is not None

    def refuses(self, mixer: Any, x: Tensor, cu_seqlens: Tensor | None = None) -> str | None:
        """Why x [B, T, D] goes through the layer's separate steps, or None. (So it does with a state of another's.)"""
        if x.shape[1] != 1 or cu_seqlens is not None:
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
        if not all(map(partial(_as_is, x.dtype), self._weights(mixer))):
            return f"not all weights are contiguous and {x.dtype}, as x is, and where they were"
        return None

    def _weights(self, mixer: Any) -> list[Any]:
        """None where a module was replaced by another kind of module. (An nn.Module's attributes are slow.)"""
        found = []
        for parents, name in self._places:
            module = mixer
            for parent in parents:
                module = module._modules[parent]
            found.append(module._parameters.get(name))
        return found

    def run(self, mixer: Any, projected: Tensor, x: Tensor, state: OwnState) -> Tensor:
        """projected [B, parts], all that the input projection makes of x [B, 1, D] -> [B, H V]."""
        hidden = x[:, 0].contiguous() if self._reads_input else None
        weights: list[Tensor | None] = [None] * len(PLACES)
        for place, weight in zip(self._filled, self._weights(mixer), strict=True):
            weights[place] = weight
        return native_layer.run(
            projected, hidden, weights, state.memory, state.conv, state.tokens, self.kinds, self.sizes, self.numbers
        )


def _as_is(dtype: torch.dtype, weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype is dtype and weight.is_contiguous() and has_address(weight)


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
