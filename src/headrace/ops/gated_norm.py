"""`GatedNorm`, what follows a recurrence: a norm per head, the read gate, and the output gate.

Dimensions: B batch, T tokens, H heads, V value dimension per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class GatedNorm(NamedTuple):
    """The arguments of y = norm(x) · strength · gate(logits), or of norm(x · gate(logits)) · strength."""

    x: Tensor  # [B, T, H, V]
    logits: Tensor | None  # of the output gate, [B, T, H, V]; None: no gate
    strength: Tensor | None  # a factor per head of the norm's result, [B, T, H]; not of a joint norm
    weight: Tensor | None  # of the norm: rms, [V]; rms-joint and group, [H · V]
    bias: Tensor | None  # of the group norm, [H · V]
    norm: str  # read.norm of the spec
    gate: str  # activation of the gate: silu or sigmoid
    order: str  # read.order of the spec
    eps: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    def results(self) -> tuple[Tensor]:
        """Returns an empty tensor for y."""
        dtype = self.x.dtype if self.logits is None else torch.promote_types(self.x.dtype, self.logits.dtype)
        return (torch.empty_like(self.x, dtype=dtype, memory_format=torch.contiguous_format),)
