"""Products with int8 weights in PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def dequantised(integers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight integers [out, in] · scale [out] in a dtype. The product is in float32, or in float64."""
    return (integers * scale.to(torch.promote_types(dtype, torch.float32))[:, None]).to(dtype)


def run(x: Tensor, integers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x [..., in] · (integers · scale)ᵀ + bias, [..., out]."""
    return F.linear(x, dequantised(integers, scale, x.dtype), None if bias is None else bias.to(x.dtype))
