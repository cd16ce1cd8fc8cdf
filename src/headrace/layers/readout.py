"""Between a linear mixer's recurrence and its output projection: the norm and the output gate.

Dimensions: B batch, T tokens, H heads, V value dimension per head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.call import accumulator

GROUP_NORM_EPS = 64e-5  # RWKV-6: 1e-5 · 8², where 8 is its head size divisor


def weight_size(norm: str, num_heads: int, value_dim: int) -> int | None:
    """Returns the size of a norm's weight; None for a norm without weight. norm: `read.norm` of the spec."""
    return {"rms": value_dim, "group": num_heads * value_dim, "rms-joint": num_heads * value_dim}.get(norm)


def normalise(out: Tensor, norm: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Applies a norm to out [B, T, H, V], in the accumulator's precision. norm: `read.norm` of the spec."""
    if weight is None:
        return out
    wide = out.to(accumulator(out))
    if norm == "rms":
        return F.rms_norm(wide, out.shape[-1:], weight.to(wide.dtype), eps).to(out.dtype)
    if norm == "rms-joint":
        return F.rms_norm(wide.flatten(-2), weight.shape, weight.to(wide.dtype), eps).view_as(wide).to(out.dtype)
    assert norm == "group" and bias is not None
    centred = F.layer_norm(wide, out.shape[-1:], eps=GROUP_NORM_EPS)
    return (centred * weight.view(out.shape[-2:]) + bias.view(out.shape[-2:])).to(out.dtype)


class OutputGate(nn.Module):
    """Output gate: maps its part [B, T, in_features] of the input projection to [B, T, H, V]. Low-rank gates have rank
    V."""

    def __init__(self, kind: str, num_heads: int, value_dim: int):
        super().__init__()
        self.num_heads, low_rank = num_heads, kind.endswith("low-rank")
        self.activation = F.silu if kind == "silu" else torch.sigmoid
        self.in_features = value_dim if low_rank else num_heads * value_dim
        self.up = nn.Linear(value_dim, num_heads * value_dim) if low_rank else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.up(x)).unflatten(-1, (self.num_heads, -1))
