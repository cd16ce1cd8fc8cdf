"""Linear layers with int8 weights, for faster decoding: each token reads every weight once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.backends.native.bound import ProgramOf
from ..ops.backends.native.library import DTYPES
from ..ops.backends.native.program import Program
from ..ops.checks import check_module, require
from ..ops.derivatives import has_address
from ..spec.record import require_name
from ..utils.errors import InputError

FEW = 64  # number of rows up to which the native kernel is faster than PyTorch's product with converted weights


class Int8Linear(nn.Module):
    """A linear layer y = x Wᵀ + b with int8 weights in [−127, 127] and one scale per row: its largest |entry| / 127.

    The native kernel, which reads the integers, computes up to 64 rows. Of fewer than 24 it rounds each x to 16-bit
    integers with one scale per 1,024 inputs: one infinity makes the row's output NaN. PyTorch computes more rows, with
    the weight converted to x's dtype. Sums are in float32, or float64 for float64. A cast of the module changes the
    dtype of `weight` and of the bias; integers and scales keep theirs.

    Args:
        linear: the layer whose weights are quantized.

    Raises:
        InputError: for a weight with NaN or an infinity.
    """

    integers: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        require(bool(weight.isfinite().all()), "a weight has a NaN or an infinity; expected finite numbers to quantize")
        scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.out_features, self.in_features = weight.shape
        self.register_buffer("integers", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.dtype = linear.weight.dtype
        self.program = ProgramOf(_product)

    def _apply(self, fn, recurse=True):
        self.dtype, scale = fn(self.scale.new_empty(0, dtype=self.dtype)).dtype, self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype is not scale.dtype:  # the kernel reads float32, and rounding a scale would change weights
            self.scale = scale.to(self.scale.device)
        return self

    @property
    def weight(self) -> Tensor:
        """W [out_features, in_features] in the dtype of the original layer, or the dtype of the module's last cast."""
        return self._in(self.dtype)

    def _in(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in a dtype. The product is in float32, or in float64."""
        return (self.integers * self.scale.to(torch.promote_types(dtype, torch.float32))[:, None]).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype or autocast's.

        Raises InputError for another shape, an integer dtype, and an x that requires a gradient."""
        self._check(x)
        if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        few = x.is_cpu and has_address(x) and x.numel() <= FEW * self.in_features
        if few and x.dtype is not torch.float64 and (out := self._natively(x)) is not None:
            return out
        return F.linear(x, self._in(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    @torch.no_grad()  # there is no gradient in any case
    def _natively(self, x: Tensor) -> Tensor | None:
        """Returns the result of the native kernel, or None if it cannot run."""
        program, _ = self.program.find(self)
        ready = None if program is None else program.take([], x.numel() // self.in_features)
        if ready is None:
            return None
        rows = (x if x.dtype in DTYPES else x.float()).contiguous()
        out = rows.new_empty(*x.shape[:-1], self.out_features)
        ready.run({0: rows, 2: out})
        return out.to(x.dtype)

    def _check(self, x: Tensor) -> None:
        if torch.is_grad_enabled() and x.requires_grad:
            raise InputError("x requires a gradient, which a quantized layer does not have; expected torch.no_grad()")
        if x.shape[-1:] != (self.in_features,):
            raise InputError(f"x has shape {list(x.shape)}; expected [..., {self.in_features}]")
        if not x.is_floating_point():
            raise InputError(f"x has dtype {x.dtype}; expected a floating-point dtype")
        if x.device != self.integers.device:
            raise InputError(f"x is on {x.device} and the weights are on {self.integers.device}; expected one device")


def _product(program: Program, layer: Int8Linear) -> None:
    """Builds the program of one product."""
    x, y = program.columns(layer.in_features), program.columns(layer.out_features)
    program.add("load", out=x, outputs=layer.in_features)
    program.linear(layer, x, y)
    program.add("store", x=y, inputs=layer.out_features)


def quantize(model: nn.Module, kind: str = "int8") -> nn.Module:
    """Replaces the linear layers of a model by Int8Linear, in place, and returns the model, for inference only.

    Embeddings, also when tied to the head, norms, gates and decays are not quantized. A quantized model cannot be
    trained, and its saved weights cannot be loaded: save the original model instead.

    Args:
        model: a model or a layer in any floating-point dtype; changed in place.
        kind: "int8", the only one.

    Raises:
        InputError: for a kind other than "int8", for a model that is itself a linear layer, and for one with adapters.
    """
    check_module(model=model)
    require_name(("int8",), kind=kind)
    if type(model) is nn.Linear:
        raise InputError("model is a linear layer itself; expected a module that contains it, or use Int8Linear")
    if any(hasattr(module, "base_layer") for module in model.modules()):  # PEFT's name for what an adapter wraps
        raise InputError("model has adapters; expected model.merge_and_unload()")
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and getattr(parent, "quantizable", True):
                setattr(parent, name, Int8Linear(layer))
    return model.eval().requires_grad_(False)
