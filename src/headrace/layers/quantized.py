"""Linear layers with weights in int8 or bfloat16, for faster decoding: each token reads every weight once."""

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

KINDS = "int8", "bfloat16"
FEW = 64  # number of rows up to which the native kernel is faster than PyTorch's product with converted weights


class QuantizedLinear(nn.Module):
    """A linear layer y = x Wᵀ + b with weights in bfloat16, or in int8: integers in [−127, 127] and one scale per row,
    its largest |entry| / 127; in bfloat16 it is 1.

    The native kernel, which reads the stored weights, computes up to 64 rows. Of fewer than 24 with int8 weights it
    rounds each x to 16-bit integers with one scale per 1,024 inputs: one infinity makes the row's output NaN. PyTorch
    computes more rows, with the weight converted to x's dtype. Sums are in float32, or float64 for float64. A cast of
    the module changes the dtype of `weight` and of the bias; stored weights and scales keep theirs.

    kind: "int8" or "bfloat16". Raises InputError for a weight that is NaN or infinite, also if rounding makes it so.
    """

    stored: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, kind: str = "int8"):
        super().__init__()
        require_name(KINDS, kind=kind)
        rounded = linear.weight.detach().float()
        scale = rounded.new_ones(len(rounded))
        if kind == "int8":
            scale = rounded.abs().amax(1).clamp_min(127 * torch.finfo(torch.float32).tiny) / 127
            rounded = (rounded / scale[:, None]).round()
        stored = rounded.to(getattr(torch, kind))
        finite = (stored.isfinite() & rounded.isfinite()).all()
        require(bool(finite), "a weight has a NaN or an infinity; expected finite numbers to quantize")
        self.out_features, self.in_features = stored.shape
        self.register_buffer("stored", stored)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.dtype = linear.weight.dtype
        self.program = ProgramOf(_product)

    def _apply(self, fn, recurse=True):
        self.dtype = fn(self.stored.new_empty(0, dtype=self.dtype)).dtype
        before = {"stored": self.stored, "scale": self.scale}
        super()._apply(fn, recurse)
        for name, x in before.items():
            if (cast := getattr(self, name)).dtype is not x.dtype:  # the kernel reads x's, and a cast changes weights
                setattr(self, name, x.to(cast.device))
        return self

    @property
    def weight(self) -> Tensor:
        """W [out_features, in_features] in the dtype of the original layer, or the dtype of the module's last cast."""
        return self._in(self.dtype)

    def _in(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in a dtype. The product is in float32, or in float64."""
        return (self.stored * self.scale.to(torch.promote_types(dtype, torch.float32))[:, None]).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features], in x's dtype or autocast's.

        Raises InputError for another shape, an integer dtype, another device, and an x that requires a gradient."""
        self._check(x)
        if (kind := x.device.type) != "meta" and torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
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
        if not x.is_floating_point() or x.device != self.stored.device:
            raise InputError(f"x is {x.dtype} on {x.device}; expected a floating-point dtype on {self.stored.device}")


def _product(program: Program, layer: QuantizedLinear) -> None:
    """Builds the program of one product."""
    x, y = program.columns(layer.in_features), program.columns(layer.out_features)
    program.add("load", out=x, outputs=layer.in_features)
    program.linear(layer, x, y)
    program.add("store", x=y, inputs=layer.out_features)


def quantize(model: nn.Module, kind: str = "int8") -> nn.Module:
    """Replaces the linear layers of a model by QuantizedLinear, in place, and returns the model, for inference only.

    Embeddings, also when tied to the head, experts, norms, gates and decays are not quantized. A quantized model cannot
    be trained, and its saved weights cannot be loaded: save the original model instead.

    Args:
        model: a model or a layer in any floating-point dtype; changed in place.
        kind: "int8"; or "bfloat16", for a float32 model: half the memory and most of the time of a token, with all
            arithmetic in float32 as before. Weights that were released in bfloat16 stay the same numbers.

    Raises:
        InputError: for another kind, for a model that is itself a linear layer or has another kind of weights already,
            and for one with adapters.
    """
    check_module(model=model)
    require_name(KINDS, kind=kind)
    if type(model) is nn.Linear:
        raise InputError("model is a linear layer itself; expected a module that contains it, or use QuantizedLinear")
    if any(hasattr(module, "base_layer") for module in model.modules()):  # PEFT's name for what an adapter wraps
        raise InputError("model has adapters; expected model.merge_and_unload()")
    stored = {layer.stored.dtype for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    require(stored <= {getattr(torch, kind)}, f"kind={kind!r} of a model with {stored}; expected the original model")
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear and getattr(parent, "quantizable", True):
                setattr(parent, name, QuantizedLinear(layer, kind))
    return model.eval().requires_grad_(False)
