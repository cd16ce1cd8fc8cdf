"""Blocks, each with a token mixer and an MLP.

Dimensions: B batch, T tokens, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.checks import require
from ...spec.attention import AttentionSpec
from ...spec.record import NonNegativeFloat, PositiveFloat, PositiveInt, Record
from ...spec.serialise import Spec
from ...spec.stack import BlockStyle, Layer, as_layers
from .. import SoftmaxAttention, build
from ..base import Mixer
from .moe import MixtureOfExperts


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


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """W_down f(W_up x), or W_down (f(W_gate x) ⊙ W_up x) if the style's MLP is gated (arXiv 2002.05202)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        assert sizes.intermediate_size is not None
        D, width, style = sizes.hidden_size, sizes.intermediate_size, sizes.style
        self.activation = ACTIVATIONS[style.mlp]
        self.gate_proj = nn.Linear(D, width, bias=style.bias) if style.gated else None
        self.up_proj = nn.Linear(D, width, bias=style.bias)
        self.down_proj = nn.Linear(width, D, bias=style.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        hidden = self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(x)) * up
        return self.down_proj(hidden)


def build_norm(sizes: Sizes, inputs: int = 1) -> nn.Module:
    """Returns the style's norm. inputs: number of hidden-size vectors concatenated at the input."""
    width = inputs * sizes.hidden_size
    if sizes.style.norm == "layer":
        return nn.LayerNorm(width, eps=sizes.norm_eps, bias=sizes.style.bias)
    return nn.RMSNorm(width, eps=sizes.norm_eps)


def build_mlp(kind: str, sizes: Sizes) -> nn.Module | None:
    """Returns the MLP or mixture of experts of a layer, or None. kind: the layer's `mlp`."""
    style, width = sizes.style, sizes.intermediate_size
    if kind == "none" or width is None:
        return None
    if kind == "one":
        return MLP(sizes)
    assert style.experts is not None
    return MixtureOfExperts(style.experts, sizes.hidden_size, width, ACTIVATIONS[style.mlp], style.gated)


def mixer_settings(sizes: Sizes, layer_idx: int = 0, num_layers: int = 1) -> dict[str, Any]:
    """Returns the keyword arguments of a mixer."""
    return {
        "hidden_size": sizes.hidden_size, "num_heads": sizes.num_heads, "layer_idx": layer_idx,
        "num_layers": num_layers, "norm_eps": sizes.norm_eps, "rope_theta": sizes.rope_theta,
    }  # fmt: skip


class Block(nn.Module):
    """A residual block: x + mixer(norm(x)), then x + mlp(norm(x)); with post-norm norm(x + mixer(x)), then
    norm(x + mlp(x)). Cross-attention, if any, is a third residual branch between the two."""

    def __init__(self, layer: Layer | Spec, sizes: Sizes, layer_idx: int = 0, num_layers: int = 1):
        super().__init__()
        layer = as_layers(layer)[0]
        self.post = sizes.style.order == "post"
        self.mixer_norm = build_norm(sizes)
        self.mixer = build(layer.mixer, causal=sizes.causal, **mixer_settings(sizes, layer_idx, num_layers))
        self.cross = None
        if sizes.cross is not None:
            self.cross_norm = build_norm(sizes)
            self.cross = SoftmaxAttention(sizes.cross, causal=False, **mixer_settings(sizes))
        self.mlp = build_mlp(layer.mlp, sizes)
        if self.mlp is not None:
            self.mlp_norm = build_norm(sizes)
        self.link = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False) if layer.shared else None

    def forward(
        self, x: Tensor, state: Any = None, beside: Tensor | None = None, *,
        mask: Tensor | None = None, cu_seqlens: Tensor | None = None, memory: Any = None, in_place: bool = False,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Applies the block: x [B, T, D] -> (x [B, T, D], the mixer's next state).

        Args:
            state, mask, cu_seqlens, in_place: as in `Backbone.forward`, with the state of this block's mixer.
            beside: the output [B, T, D] of the shared block, for a layer with shared=True.
            memory: keys and values of the other sequence, for cross-attention.
        """
        where = {"mask": mask, "cu_seqlens": cu_seqlens, "in_place": in_place}
        linked = x if self.link is None else x + self.link(beside)
        y, state = self.mixer(self._input(self.mixer_norm, linked), state, **where)
        x = self._add(self.mixer_norm, x, y)
        if self.cross is not None:
            require(memory is not None, "memory=None in a block with cross-attention; expected the result of remember")
            x = self._add(self.cross_norm, x, self.cross.cross(self._input(self.cross_norm, x), memory))
        if self.mlp is not None:
            x = self._add(self.mlp_norm, x, self.mlp(self._input(self.mlp_norm, x)))
        return x, state

    @property
    def recurrent(self) -> bool:
        """Whether the mixer is a recurrence with a state of one size, whatever the number of tokens."""
        return isinstance(self.mixer, Mixer) and self.mixer.fixed_size and self.link is None

    def _input(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Returns the input of a branch."""
        return x if self.post else norm(x)

    def _add(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Returns the residual stream with the output of a branch."""
        return norm(x + y) if self.post else x + y


class Shared(nn.Module):
    """An attention block that several layers share (Zamba, arXiv 2405.16712). Its input is the concatenation of x and
    the embeddings."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        assert sizes.style.shared is not None
        D = sizes.hidden_size
        self.mixer_norm = build_norm(sizes, 2)
        settings = mixer_settings(sizes) | {"hidden_size": 2 * D}
        self.mixer = SoftmaxAttention(sizes.style.shared, out_size=D, **settings)
        self.mlp_norm = build_norm(sizes)
        self.mlp = build_mlp("one", sizes)

    def forward(
        self, x: Tensor, embedded: Tensor, state: Any = None, *,
        mask: Tensor | None = None, cu_seqlens: Tensor | None = None, in_place: bool = False,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """x, embedded [B, T, D] -> (y [B, T, D], state), without a residual connection."""
        both = self.mixer_norm(torch.cat([x, embedded], -1))
        y, state = self.mixer(both, state, mask=mask, cu_seqlens=cu_seqlens, in_place=in_place)
        y = self.mlp_norm(y)
        return y if self.mlp is None else self.mlp(y), state
