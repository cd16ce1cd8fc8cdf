"""The map and the norm of q and k of delta fast weights (arXiv 2102.11174)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.linear.features import EPS, FEATURE_MAPS, QK_NORMS
from ..ops.call import accumulator


def dpfp(x: Tensor, shifts: int) -> Tensor:
    """The deterministic parameter-free projection of arXiv 2102.11174, section 5.3: [..., K] -> [..., 2 K · shifts].

    With r = relu([x, −x]), the features are the products of r and r rolled by 1, …, `shifts` positions."""
    r = F.relu(torch.cat([x, -x], -1))
    return torch.cat([r * r.roll(-i, -1) for i in range(1, shifts + 1)], -1)


def sum_norm(x: Tensor) -> Tensor:
    """Returns x / (Σ x + 1e-6) over the last dimension, for x ≥ 0. The result has |x|² ≤ 1."""
    wide = x.to(accumulator(x))
    return (wide / (wide.sum(-1, keepdim=True) + EPS)).to(x.dtype)


FEATURE_MAPS.update({f"dpfp-{shifts}": partial(dpfp, shifts=shifts) for shifts in (1, 2, 3)})
QK_NORMS["sum"] = sum_norm
