"""Feature maps of q and k. Taylor features are a module of their own (taylor.py).

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def dpfp(x: Tensor, shifts: int) -> Tensor:
    """The deterministic parameter-free projection of arXiv 2102.11174, section 5.3: [..., K] -> [..., 2 K · shifts].

    With r = relu([x, −x]), the features are the products of r and r rolled by 1, …, `shifts` positions."""
    r = F.relu(torch.cat([x, -x], -1))
    return torch.cat([r * r.roll(-i, -1) for i in range(1, shifts + 1)], -1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "silu": F.silu,
    "dpfp-1": partial(dpfp, shifts=1),
    "dpfp-2": partial(dpfp, shifts=2),
    "dpfp-3": partial(dpfp, shifts=3),
}
