"""`QKNorm`, what q and k have between their feature map and the recurrence: a norm over their channels, and the rotary
embedding.

Dimensions: B batch, T tokens, K key dimension per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6  # of both norms


class QKNorm(NamedTuple):
    """The arguments of y = rotary(norm(x)) of q or k."""

    x: Tensor  # [B, T, heads, K]
    positions: Tensor | None  # integers [B or 1, T]; None: no rotary embedding
    norm: str  # inputs.qk_norm of the spec: none, l2 or sum
    theta: float  # base of the rotary embedding

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:2]

    def result(self) -> Tensor:
        """Returns an empty tensor for y."""
        return torch.empty_like(self.x, memory_format=torch.contiguous_format)
