"""Rotary position embeddings (arXiv 2104.09864).

Dimensions: B batch, T tokens, K key dimension per head.
"""

import torch
from torch import Tensor

from ..ops.call import accumulator


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates x [B, T, heads, K] by its positions [B or 1, T]. theta: base of the frequencies.

    Channel i is paired with channel i + K/2. Angles are float64: a float32 angle is off by 0.004 at position 100000."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions[..., None, None].double() * frequency
    cos, sin = angle.cos().to(accumulator(x)), angle.sin().to(accumulator(x))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
