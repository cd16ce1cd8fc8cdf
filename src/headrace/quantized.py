"""Weights in eight bits, for decoding: a token reads every weight once, and a quarter of the bytes takes less time."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .backends import derivatives, native
from .errors import InputError

FEW = 8  # rows up to which reading the weights is what takes the time


class Int8Linear(nn.Module):
    """y = x Wᵀ + b, with W as integers in [−127, 127] and a scale for each row of it, its largest entry over 127.

    x keeps its precision, and sums are in float32. Few rows go through the native kernel, which reads the integers;
    more, and every call where it is not there, through `weight`, made for the call.
    """

    integers: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.out_features, self.in_features = weight.shape
        self.register_buffer("integers", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.dtype = linear.weight.dtype

    @property
    def weight(self) -> Tensor:
        return (self.integers * self.scale[:, None]).to(self.dtype)

    def _refuses(self, x: Tensor) -> str | None:
        """Why PyTorch multiplies x with `weight`, or None."""
        if native.missing or not x.is_cpu:
            return native.missing or f"the kernel runs on the CPU, and x is on {x.device.type}"
        if x.numel() > FEW * self.in_features:
            return f"the kernel is for up to {FEW} rows"
        if derivatives.transformed() or not derivatives.has_address(x):
            return f"the kernel reads memory, and x is transformed or a {type(x).__name__}"
        return None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]. Raises InputError where a gradient through it is wanted."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise InputError("a quantised layer got an input that requires a gradient; expected torch.no_grad()")
        if self._refuses(x):
            return F.linear(x, self.weight, self.bias)
        rows = x.float().reshape(-1, self.in_features).contiguous()
        out = native.int8_product(rows, self.integers, self.scale).to(x.dtype).unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias


def quantize(model: nn.Module, kind: str = "int8") -> nn.Module:
    """The model, its linear layers replaced in place by Int8Linear: for inference alone.

    The embedding stays as it is, also where it is tied to the head; so do norms, gates and decays. Such a model cannot
    be trained, nor be loaded from what it saves: save the one it was made from. Raises InputError for another kind."""
    if kind != "int8":
        raise InputError(f"kind={kind!r} is unknown; expected 'int8'")
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                setattr(parent, name, Int8Linear(layer))
    return model.eval().requires_grad_(False)
