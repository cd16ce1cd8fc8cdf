"""`LogDecay`, the decays that an input of a layer controls.

Dimensions: B batch, T tokens, H heads, K key dimension per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .call import accumulator


class LogDecay(NamedTuple):
    """The arguments of a logarithm of a decay, per head [B, T, H] or per channel [B, T, H, K], in the accumulator's
    precision: rate · log σ(x) (sigmoid), −exp(log_rate) softplus(x + bias) (softplus) or −exp(x + bias) (exp)."""

    x: Tensor  # [B, T, H] or [B, T, H, K]
    bias: Tensor | None  # [H] or [H · K]; None for sigmoid
    log_rate: Tensor | None  # [H]; None but for softplus
    kind: str  # sigmoid, softplus or exp
    rate: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:3]

    def result(self) -> Tensor:
        """Returns an empty tensor for the logarithm."""
        return torch.empty_like(self.x, dtype=accumulator(self.x), memory_format=torch.contiguous_format)
