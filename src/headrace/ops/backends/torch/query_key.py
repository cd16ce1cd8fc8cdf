"""The gates, the norms and the rotary embedding of q and k in PyTorch.

Dimensions: B batch, T tokens, K key dimension per head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...call import accumulator
from ...query_key import EPS, QueryKey
from .competition import activate, scores


def run(call: QueryKey) -> tuple[Tensor, Tensor | None]:
    """Returns y [B, T, Hq, K] and the gates [B, T, H], if any."""
    x = NORMS[call.norm](call.x)
    y = x if call.positions is None else rotary(x, call.positions, call.theta)
    return y, None if call.weight is None else activate(scores(call.x, call.weight), call.activation)


def l2_norm(x: Tensor) -> Tensor:
    """Returns x / sqrt(|x|² + 1e-6) over the last dimension."""
    wide = x.to(accumulator(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def sum_norm(x: Tensor) -> Tensor:
    """Returns x / (Σ x + 1e-6) over the last dimension, for x ≥ 0. The result has |x|² ≤ 1."""
    wide = x.to(accumulator(x))
    return (wide / (wide.sum(-1, keepdim=True) + EPS)).to(x.dtype)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "l2": l2_norm, "sum": sum_norm}


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Applies rotary position embeddings to x [B, T, heads, K] at positions [B or 1, T] (arXiv 2104.09864).

    Channel i is paired with channel i + K/2. Angles are float64: a float32 angle is off by 0.004 at position 100000."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions[..., None, None].double() * frequency
    cos, sin = angle.cos().to(accumulator(x)), angle.sin().to(accumulator(x))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
