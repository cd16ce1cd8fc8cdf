"""Blocks, each with a token mixer and an MLP.

Dimensions: B batch, T tokens, D hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.backends.triton.elementwise import silu_product
from ...ops.checks import require
from ...spec.attention import AttentionSpec
from ...spec.record import NonNegativeFloat, PositiveFloat, PositiveInt, Record
from ...spec.serialize import Spec
from ...spec.stack import MLPS, SHARED, BlockStyle, Layer, as_layers
from .. import SoftmaxAttention, build
from ..base import Mixer, named
from ..norms import OffsetRMSNorm, add_and_norm


@dataclass(frozen=True)
class Sizes(Record):
    """Settings that all blocks of a stack share."""

    hidden_size: PositiveInt
    num_heads: PositiveInt
    intermediate_size: PositiveInt | None  # width of the MLP; None: no MLP
    norm_eps: NonNegativeFloat = 1e-6
    rope_theta: PositiveFloat = 10000.0  # base of the rotary frequencies
    max_positions: PositiveInt = 2048  # number of learned absolute positions
    style: BlockStyle = field(default_factory=BlockStyle)
    causal: bool = True  # False for an encoder, in which every token sees all tokens
    cross: AttentionSpec | None = None  # cross-attention between mixer and MLP; None: no cross-attention


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# By name, functions that are the same objects in a copied or pickled model.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu, "geglu": F.gelu, "gelu": F.gelu, "relu": F.relu, "relu2": relu2,
    "geglu-tanh": gelu_tanh, "gelu-tanh": gelu_tanh,
}  # fmt: skip
BEFORE = ("pre", "both", "parallel", "parallel-joint")  # orders in which branches have norms of their inputs
AFTER = {"branch": "_norm", "both": "_after"}  # how the norm of the output of a branch is called, by the order


class MLP(nn.Module):
    """W_down f(W_up x), or W_down (f(W_gate x) ⊙ W_up x) if the style's MLP is gated (arXiv 2002.05202)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        assert sizes.intermediate_size is not None
        D, width, style = sizes.hidden_size, sizes.intermediate_size, sizes.style
        self.kind, self.activation = style.mlp, ACTIVATIONS[style.mlp]
        self.gate_proj = nn.Linear(D, width, bias=style.bias) if style.gated else None
        self.up_proj = nn.Linear(D, width, bias=style.bias)
        self.down_proj = nn.Linear(width, D, bias=style.bias)

    def forward(self, x: Tensor, adapter: nn.Module | None = None) -> Tensor:
        """x [B, T, D] -> [B, T, D]. adapter: maps x to what is added to both projections of it, side by side."""
        inputs = [p(x) for p in (self.gate_proj, self.up_proj) if p is not None]
        if adapter is not None:
            inputs = [y + z for y, z in zip(inputs, adapter(x).chunk(len(inputs), -1), strict=True)]
        if self.gate_proj is not None and self.activation is F.silu:
            return self.down_proj(silu_product(inputs[1], inputs[0]))
        hidden = self.activation(inputs[0])
        return self.down_proj(hidden if self.gate_proj is None else hidden * inputs[1])


def build_norm(sizes: Sizes, inputs: int = 1) -> nn.Module:
    """Returns the style's norm. inputs: number of hidden-size vectors concatenated at the input."""
    width = inputs * sizes.hidden_size
    norm, bias = sizes.style.norm, sizes.style.bias
    if norm.startswith("layer"):
        return nn.LayerNorm(width, sizes.norm_eps, norm != "layer-plain", bias or norm == "layer-bias")
    kind = OffsetRMSNorm if norm == "rms-offset" else nn.RMSNorm
    return kind(width, sizes.norm_eps, norm != "rms-plain")


def build_mlp(kind: str, sizes: Sizes) -> nn.Module | None:
    """Returns the MLP or mixture of experts of a layer, or None. kind: the layer's `mlp`."""
    style, width = sizes.style, sizes.intermediate_size
    if "none" in (kind, style.mlp) or width is None:
        return None
    if kind == "one":
        return named(MLPS[style.mlp])(sizes.hidden_size, width) if style.mlp in MLPS else MLP(sizes)
    spec = style.experts
    assert spec is not None
    shared = MLP(replace(sizes, intermediate_size=spec.shared)) if spec.shared else None
    activation = ACTIVATIONS[style.mlp]
    return named(spec.layer)(spec, sizes.hidden_size, width, activation, style.gated, shared, style.bias)


def mixer_settings(sizes: Sizes, layer_idx: int = 0, num_layers: int = 1) -> dict[str, Any]:
    """Returns the keyword arguments of a mixer."""
    return {
        "hidden_size": sizes.hidden_size, "num_heads": sizes.num_heads, "layer_idx": layer_idx,
        "num_layers": num_layers, "norm_eps": sizes.norm_eps, "rope_theta": sizes.rope_theta,
    }  # fmt: skip


class Block(nn.Module):
    """A residual block: x + mixer(norm(x)), then x + mlp(norm(x)), or another `BlockStyle.order`. A parallel mixer has
    the input of the mixer, and the branch is their sum. Cross-attention, if any, is a third branch between the two."""

    def __init__(self, layer: Layer | Spec, sizes: Sizes, layer_idx: int = 0, num_layers: int = 1):
        super().__init__()
        layer = as_layers(layer)[0]
        self.order = layer.order or sizes.style.order
        self.mixer_norm = build_norm(sizes)
        settings = mixer_settings(sizes, layer_idx, num_layers) | {"causal": sizes.causal}
        self.mixer = build(layer.mixer, **settings)
        self.parallel = None if layer.parallel is None else build(layer.parallel, **settings)
        self.cross = None
        if sizes.cross is not None:
            self.cross_norm = build_norm(sizes)
            self.cross = named(sizes.cross.layer(False))(sizes.cross, causal=False, **mixer_settings(sizes))
        self.mlp = build_mlp(layer.mlp, sizes)
        if self.mlp is not None and self.order != "parallel-joint":
            self.mlp_norm = build_norm(sizes)
        if self.order == "both":
            self.mixer_after = build_norm(sizes)
            others = self.cross, self.mlp
            self.cross_after, self.mlp_after = (None if x is None else build_norm(sizes) for x in others)
        self.link = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False) if layer.shared else None
        self.adapters = named(SHARED["adapters"])(sizes) if layer.shared else None

    def forward(
        self, x: Tensor, states: Sequence[Any] | None = None, beside: Tensor | None = None, *,
        mask: Tensor | None = None, cu_seqlens: Tensor | None = None, memory: Any = None, carried: Any = None,
        in_place: bool = False, next_states: list[Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Applies the block: x [B, T, D] -> x [B, T, D], a tensor alone, as tools for decoder layers expect it.

        Args:
            states: of the mixer, of the parallel mixer, of an MLP that has one; None: x begins its sequences.
            mask, cu_seqlens, in_place: as in `Backbone.forward`.
            beside: the output [B, T, D] of the shared block, for a layer with shared=True.
            memory: keys and values of the other sequence, for cross-attention.
            carried: what the layers below have left, a `Carried`.
            next_states: a list to which the next states are appended.
        """
        where = {"mask": mask, "cu_seqlens": cu_seqlens, "in_place": in_place}
        before = repeat(None) if states is None else iter(states)
        after = [] if next_states is None else next_states
        linked = self._input("mixer", x if self.link is None else x + self.link(beside))
        also = {"carried": carried} if getattr(self.mixer, "carries", False) else {}
        y, state = self.mixer(linked, next(before), **where, **also)
        after.append(state)
        if self.parallel is not None:
            other, state = self.parallel(linked, next(before), **where)
            y = y + other
            after.append(state)
        old, read = x, linked
        if self.order == "pre" and self.cross is None and self.mlp is not None:
            x, read = add_and_norm(self.mlp_norm, x, y)
        else:
            x = self._add("mixer", x, y)
            if self.cross is not None:
                missing = "memory=None in a block with cross-attention; expected the result of remember"
                require(memory is not None, missing)
                x = self._add("cross", x, self.cross.cross(self._input("cross", x), memory))
            if self.mlp is None:
                return x
            if self.order != "parallel-joint":
                read = self._input("mlp", old if self.order == "parallel" else x)
        y, *own = self.mlp(read, next(before), **where) if isinstance(self.mlp, Mixer) else (self.mlp(read),)
        after += own
        return self._add("mlp", x, y)

    @property
    def mixers(self) -> list[nn.Module]:
        """The mixer, and the parallel mixer if there is one."""
        return [self.mixer] if self.parallel is None else [self.mixer, self.parallel]

    def reads_lengths(self, packed: bool) -> bool:
        """Whether a mixer reads the lengths of sequences on the host. packed: whether sequences are packed."""
        static = all(getattr(mixer, "static_shapes", False) for mixer in self.mixers)
        return not static or (packed and any(isinstance(mixer, SoftmaxAttention) for mixer in self.mixers))

    @property
    def states(self) -> int:
        """Number of states."""
        return len(self.mixers) + isinstance(self.mlp, Mixer)

    @property
    def recurrent(self) -> bool:
        """Whether the mixers are recurrences with a state of one size, whatever the number of tokens."""
        return self.link is None and all(isinstance(mixer, Mixer) and mixer.fixed_size for mixer in self.mixers)

    def _input(self, branch: str, x: Tensor) -> Tensor:
        """Returns the input of a branch."""
        return getattr(self, f"{branch}_norm")(x) if self.order in BEFORE else x

    def _add(self, branch: str, x: Tensor, y: Tensor) -> Tensor:
        """Returns the residual stream with the output of a branch."""
        if self.order == "post":
            return getattr(self, f"{branch}_norm")(x + y)
        after = AFTER.get(self.order)
        return x + (y if after is None else getattr(self, branch + after)(y))
