"""Products with SiLU."""

import torch.nn.functional as F
from torch import Tensor

from ..ops.backends.triton import elementwise


def silu_product(x: Tensor, gate: Tensor, backend: str = "auto") -> Tensor:
    """Returns x SiLU(gate) for x and gate [B, T, C]."""
    if x.shape == gate.shape and x.dtype == gate.dtype and elementwise.computes(backend, x):
        return elementwise.SiLUProduct.apply(x, gate)
    return x * F.silu(gate)
