"""Feature maps and norms of q and k, and the power of the length that divides v. Taylor features are a module of their
own (taylor.py).

Dimensions: K key dimension per head.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.call import accumulator

EPS = 1e-6  # of both norms


def dpfp(x: Tensor, shifts: int) -> Tensor:
    """The deterministic parameter-free projection of arXiv 2102.11174, section 5.3: [..., K] -> [..., 2 K · shifts].

    With r = relu([x, −x]), the features are the products of r and r rolled by 1, …, `shifts` positions."""
    r = F.relu(torch.cat([x, -x], -1))
    return torch.cat([r * r.roll(-i, -1) for i in range(1, shifts + 1)], -1)


def l2_norm(x: Tensor) -> Tensor:
    """Returns x / sqrt(|x|² + 1e-6) over the last dimension."""
    wide = x.to(accumulator(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def sum_norm(x: Tensor) -> Tensor:
    """Returns x / (Σ x + 1e-6) over the last dimension, for x ≥ 0. The result has |x|² ≤ 1."""
    wide = x.to(accumulator(x))
    return (wide / (wide.sum(-1, keepdim=True) + EPS)).to(x.dtype)


def divided_by_length(v: Tensor, length: Tensor, power: Tensor) -> Tensor:
    """Returns v / n^σ(c): v [B, T, H, V], the numbers of tokens n in length [B or 1, T], c in power [H]."""
    wide = length[..., None, None].to(accumulator(v)) ** torch.sigmoid(power)[:, None]
    return (v / wide).to(v.dtype)


def identity(x: Tensor) -> Tensor:
    return x


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": identity,
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "silu": F.silu,
    "dpfp-1": partial(dpfp, shifts=1),
    "dpfp-2": partial(dpfp, shifts=2),
    "dpfp-3": partial(dpfp, shifts=3),
}
QK_NORMS: dict[str, Callable[[Tensor], Tensor]] = {"none": identity, "l2": l2_norm, "sum": sum_norm}  # without weights
