"""Weights in eight bits, for decoding: a token reads every weight once, and a quarter of the bytes takes less time."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import derivatives
from ..ops.checks import require
from ..ops.native import library as native
from ..utils.errors import InputError

FEW = 8  # rows up to which reading the weights is what takes the time


class Int8Linear(nn.Module):
    """y = x Wᵀ + b, with W as integers in [−127, 127] and a scale for each row of it, its largest entry over 127.

    x keeps its precision, and sums are in float32, for float64 in float64. Few rows go through the native kernel, which
    reads the integers; more, and every call where it is not there, through the weight in x's precision, made for the
    call. A cast of the module changes the precision of `weight` and of the bias; integers and scales stay as they are.
    """

    integers: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        require(bool(weight.isfinite().all()), "a weight has a NaN or an infinity; expected finite numbers to quantise")
        scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.out_features, self.in_features = weight.shape
        self.register_buffer("integers", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.dtype = linear.weight.dtype

    def _apply(self, fn, recurse=True):
        self.dtype, scale = fn(self.scale.new_empty(0, dtype=self.dtype)).dtype, self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype is not scale.dtype:  # the kernel reads float32, and a rounded scale is another weight
            self.scale = scale.to(self.scale.device)
        return self

    @property
    def weight(self) -> Tensor:
        """W [out_features, in_features] in the precision of the layer that it was made from, or was cast to since."""
        return self._weight(self.dtype)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        return (self.integers * self.scale.to(torch.promote_types(dtype, torch.float32))[:, None]).to(dtype)

    def _refuses(self, x: Tensor) -> str | None:
        """Why PyTorch multiplies x with `weight`, or None."""
        if native.missing or not x.is_cpu:
            return native.missing or f"the kernel runs on the CPU, and x is on {x.device.type}"
        if x.dtype is torch.float64 or x.numel() > FEW * self.in_features:
            return f"the kernel is for up to {FEW} rows in float32 or less, and x is {list(x.shape)} in {x.dtype}"
        if derivatives.transformed() or not derivatives.has_address(x):
            return f"the kernel reads memory, and x is transformed or a {type(x).__name__}"
        return None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's precision or autocast's. Raises InputError for another
        shape, for integers, and where a gradient through the layer is wanted."""
        self._check(x)
        if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self._refuses(x):
            return F.linear(x, self._weight(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        rows = x.float().reshape(-1, self.in_features).contiguous()
        out = native.int8_product(rows, self.integers, self.scale)
        out = out if self.bias is None else out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _check(self, x: Tensor) -> None:
        if torch.is_grad_enabled() and x.requires_grad:
            raise InputError("a quantised layer got an input that requires a gradient; expected torch.no_grad()")
        if x.shape[-1:] != (self.in_features,):
            raise InputError(f"x has shape {list(x.shape)}; expected [..., {self.in_features}]")
        if not x.is_floating_point():
            raise InputError(f"x has dtype {x.dtype}; expected a floating-point dtype")
        if x.device != self.integers.device:
            raise InputError(f"x is on {x.device} and the weights are on {self.integers.device}; expected the same")


def quantize(model: nn.Module, kind: str = "int8") -> nn.Module:
    """The model, its linear layers replaced in place by Int8Linear: for inference alone.

    The embedding stays as it is, also where it is tied to the head; so do norms, gates and decays. Such a model cannot
    be trained, nor be loaded from what it saves: save the one it was made from. Raises InputError for another kind, and
    for a model that is nothing but a linear layer."""
    if kind != "int8":
        raise InputError(f"kind={kind!r} is unknown; expected 'int8'")
    if type(model) is nn.Linear:
        raise InputError("model is a linear layer itself; expected a module that holds it, or use Int8Linear")
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                setattr(parent, name, Int8Linear(layer))
    return model.eval().requires_grad_(False)
