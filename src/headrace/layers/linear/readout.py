"""The parameters between a linear mixer's recurrence and its output projection: of the norm and of the output gate.

Dimensions: B batch, T tokens, H heads, V value dimension per head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
GROUP_NORM_EPS = 64e-5  # RWKV-6: 1e-5 · 8², where 8 is its head size divisor


def weight_size(norm: str, num_heads: int, value_dim: int) -> int | None:
    """Returns the size of a norm's weight; None for a norm without weight. norm: `read.norm` of the spec."""
    return {"rms": value_dim, "group": num_heads * value_dim, "rms-joint": num_heads * value_dim}.get(norm)


class OutputGate(nn.Module):
    """The logits [B, T, H, V] of the output gate, from its part [B, T, in_features] of the input projection. Low-rank
    gates have rank V."""

    def __init__(self, kind: str, num_heads: int, value_dim: int):
        super().__init__()
        self.num_heads, low_rank = num_heads, kind.endswith("low-rank")
        self.activation = kind.removesuffix("-low-rank")
        self.in_features = value_dim if low_rank else num_heads * value_dim
        self.up = nn.Linear(value_dim, num_heads * value_dim) if low_rank else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).unflatten(-1, (self.num_heads, -1))
