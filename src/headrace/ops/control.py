"""`Control`, the decays and the write strengths that an input of a layer controls.

Dimensions: B batch, T tokens, H heads, K key dimension per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .call import accumulator


class Control(NamedTuple):
    """The arguments of y in the accumulator's precision, per head [B, T, H] or per channel [B, T, H, K]: a logarithm of
    a decay, rate · log σ(x) (sigmoid), −exp(log_rate) softplus(x + bias) (softplus) or −exp(x + bias) (exp), or a write
    strength β = σ(x) (beta)."""

    x: Tensor  # [B, T, H] or [B, T, H, K]
    bias: Tensor | None  # [H] or [H · K]; None for sigmoid and beta
    log_rate: Tensor | None  # [H]; None but for softplus
    kind: str  # sigmoid, softplus, exp or beta
    rate: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:3]

    def results(self) -> tuple[Tensor]:
        """Returns an empty tensor for y."""
        return (torch.empty_like(self.x, dtype=accumulator(self.x), memory_format=torch.contiguous_format),)
