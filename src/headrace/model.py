"""The stack: a token mixer and an MLP per block, each block with a mixer of its own if need be. Torch alone.

Dimensions: B batch, T tokens, D hidden size, N sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import mixers
from .checks import require
from .spec import Spec


@dataclass(frozen=True)
class Sizes:
    """What all blocks of a stack share."""

    hidden_size: int
    num_heads: int
    intermediate_size: int | None  # the MLP's width; None: blocks without an MLP
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0


def default_intermediate_size(hidden_size: int) -> int:
    """8/3 D, so that SwiGLU's three matrices weigh as much as the two of a 4 D wide MLP (arXiv 2002.05202), rounded up
    to a multiple of 256, which suits GPU tiles (the rule of flash-linear-attention); of 16 where D < 256."""
    multiple = 256 if hidden_size >= 256 else 16
    return -(-(8 * hidden_size // 3) // multiple) * multiple


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) ⊙ W_up x) (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: Spec, sizes: Sizes, layer_idx: int = 0, num_layers: int = 1):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.mixer = mixers.build(
            spec,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            layer_idx=layer_idx,
            num_layers=num_layers,
            norm_eps=sizes.norm_eps,
            rope_theta=sizes.rope_theta,
        )
        self.mlp = None
        if sizes.intermediate_size is not None:
            self.mlp_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
            self.mlp = SwiGLU(sizes.hidden_size, sizes.intermediate_size)

    def forward(
        self, x: Tensor, state: Any = None, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """x [B, T, D] -> (x [B, T, D], the mixer's state)."""
        y, state = self.mixer(self.mixer_norm(x), state, mask=mask, cu_seqlens=cu_seqlens)
        x = x + y
        if self.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, state


class Backbone(nn.Module):
    """A block per spec, and a norm: everything of a language model but its vocabulary."""

    def __init__(self, specs: Sequence[Spec], sizes: Sizes, block: type[Block] = Block):
        super().__init__()
        self.layers = nn.ModuleList(block(spec, sizes, i, len(specs)) for i, spec in enumerate(specs))
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)

    def forward(
        self,
        x: Tensor,
        states: Sequence[Any] | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """x [B, T, D] -> (x [B, T, D], a state per layer).

        Args:
            states: of the tokens before x, one per layer; None: x begins its sequences.
            mask: [B, T], False is padding, anywhere.
            cu_seqlens: [N + 1], where the sequences of a pack (B = 1) begin and end.
            inputs: a list that receives every block's input.
        """
        new_states = []
        for layer, state in zip(self.layers, states or [None] * len(self.layers), strict=True):
            if inputs is not None:
                inputs.append(x)
            x, state = layer(x, state, mask=mask, cu_seqlens=cu_seqlens)
            new_states.append(state)
        return self.norm(x), new_states


def padding_mask(attention_mask: Tensor | None, x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """attention_mask [B, T or more] -> bool [B, T] for the tokens x [B, T, D], the last ones; None: no padding.

    Raises InputError where shapes do not fit, or where x is a pack and has padding as well."""
    B, T = x.shape[:2]
    if cu_seqlens is not None:
        require(B == 1, f"cu_seqlens packs sequences into one row; expected B=1, got B={B}")
        require(cu_seqlens.dim() == 1, f"cu_seqlens has shape {list(cu_seqlens.shape)}; expected [N + 1]")
    if attention_mask is None:
        return None
    shape = list(attention_mask.shape)
    require(
        len(shape) == 2 and shape[0] == B and shape[1] >= T, f"attention_mask has shape {shape}; expected [{B}, {T}]"
    )
    mask = attention_mask[:, -T:].bool()
    if mask.all():
        return None
    require(cu_seqlens is None, "attention_mask marks padding in a pack; expected cu_seqlens alone")
    return mask


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Parameters of the module that build() makes, tied ones once. Nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def match_intermediate_size(build: Callable[[int], nn.Module], target: int) -> int:
    """The MLP width that brings the model build(width) nearest to target parameters.

    Two models are counted: each unit of width adds the same number. Raises InputError where the model is too large with
    the narrowest MLP, or has none."""
    one, two = count_parameters(partial(build, 1)), count_parameters(partial(build, 2))
    require(two > one, f"the model has {one} parameters whatever its MLP's width; expected one with an MLP")
    width = round(1 + (target - one) / (two - one))
    require(width >= 1, f"the model has {one} parameters with the narrowest MLP; expected at most target={target}")
    return width
