"""Products of a few rows with int8 weights, which the kernel reads as they are stored."""

import torch
from torch import Tensor, float64

from ... import derivatives
from ...autograd import define
from . import library as native

FEW = 8  # number of rows up to which reading the weights dominates the time


def unsupported_reason(x: Tensor, integers: Tensor) -> str | None:
    """Returns why the kernel cannot compute x [..., in] · (integers [out, in] · scale)ᵀ, or None."""
    if native.missing or torch.onnx.is_in_onnx_export():
        return native.missing or "an ONNX graph takes the products of PyTorch"
    if not x.is_cpu:
        return f"the kernel runs on the CPU, and x is on {x.device.type}"
    if x.dtype is float64 or x.numel() > FEW * integers.shape[1]:
        return f"the kernel is for up to {FEW} rows in float32 or less, and x is {list(x.shape)} in {x.dtype}"
    if derivatives.transformed() or not derivatives.has_address(x):
        return f"the kernel reads memory by address, and x is under a transform or a {type(x).__name__}"
    return None


def run(x: Tensor, integers: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x [..., in] · (integers · scale)ᵀ + bias, [..., out], with sums in float32."""
    rows = x.float().reshape(-1, integers.shape[1]).contiguous()
    out = (_product if torch.compiler.is_compiling() else native.int8_product)(rows, integers, scale)
    out = out if bias is None else out + bias
    return out.to(x.dtype).view(*x.shape[:-1], len(integers))


def _fake(x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(len(x), len(integers))


INPUTS = "(Tensor x, Tensor integers, Tensor scale)"
_product = define("int8_product", INPUTS, 1, native.int8_product, _fake, "CPU")
