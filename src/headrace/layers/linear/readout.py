"""The parameters between a linear mixer's recurrence and its output projection: of the norm and of the output gate.

Dimensions: B batch, T tokens, H heads, V value dimension per head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...spec.read import WIDE_NORMS, Read
from ..base import SelfInitialized

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
GROUP_NORM_EPS = 64e-5  # RWKV-6: 1e-5 · 8², where 8 is its head size divisor


# The lower bounds of the norms, which are the epsilons of PyTorch's F.normalize and nn.LayerNorm.
NORM_FLOORS = {"l2": 1e-12, "layer": 1e-5**0.5}


def weight_size(read: Read, num_heads: int, value_dim: int) -> int | None:
    """Returns the size of the norm's weight; None for a norm without weight."""
    if not read.weighted:
        return None
    return num_heads * value_dim if read.norm in ("group", *WIDE_NORMS) else value_dim


def normalized(x: Tensor, kind: str, floor: Tensor | float) -> Tensor:
    """Divides x [..., d] by its L2 norm ("l2") or root mean square ("rms"), or centres x and divides it by its standard
    deviation ("layer"). floor [..., 1] bounds the divisor: max(norm, floor) for "l2", else √(norm² + floor²)."""
    if kind == "l2":
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=floor)
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + floor**2)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns x · weight + bias, without what is None."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


class GateLogits(SelfInitialized):
    """The logits of a gate of the output or of v, [B, T, H, V], or [B, T, H, 1] for "sigmoid-head", from its part
    [B, T, in_features] of the input projection. Low-rank gates have rank V."""

    quantizable = False  # by `quantize`

    def __init__(self, kind: str, num_heads: int, value_dim: int, bias: bool = True):
        super().__init__()
        self.num_heads, low_rank, head = num_heads, kind.endswith("low-rank"), kind.endswith("head")
        self.activation = kind.partition("-")[0]
        self.in_features = value_dim if low_rank else num_heads if head else num_heads * value_dim
        self.up = nn.Linear(value_dim, num_heads * value_dim, bias) if low_rank else nn.Identity()
        self.bias = nn.Parameter(torch.empty(num_heads)) if head and bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.up(x)
        logits = logits if self.bias is None else logits + self.bias
        return logits.unflatten(-1, (self.num_heads, -1))
