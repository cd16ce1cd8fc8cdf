"""Checks of the tensors that `step` writes into: the state with in_place=True, and out."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..utils.errors import InputError
from .call import TOKENWISE, Call, accumulator
from .checks import check_tensor, require
from .derivatives import has_address, transformed


def check_written(state: Tensor | None, out: Tensor | None, call: Call) -> None:
    """Checks the tensors that a call of `step` writes: the state with in_place=True, and out."""
    written = {name: x for name, x in (("state", state), ("out", out)) if x is not None}
    tensors, v = dict(zip((*TOKENWISE, "state", "bonus"), call.tensors, strict=True)), call.v
    for name, x in written.items():
        check_tensor(name, x)
        dtype, shape = (v.dtype, call.out_shape) if name == "out" else (accumulator(v), x.shape)
        if x.shape != shape:  # a sentence of a symbolic size would break a compiled graph
            raise InputError(f"{name} has shape {list(x.shape)}; expected {list(shape)}")
        require(x.dtype == dtype, f"{name} has dtype {x.dtype}; expected {dtype}, since it is written")
        require(x.device == v.device, f"{name} is on {x.device} and v is on {v.device}; expected the same device")
        if not x.is_contiguous():
            raise InputError(f"{name} has strides {x.stride()}; expected to be contiguous, since it is written")
    for name, y in (tensors | written).items():
        wanted = torch.is_grad_enabled() and y is not None and y.requires_grad
        require(not wanted, f"{name} requires a gradient, which in_place and out lack; expected torch.no_grad()")
    if not torch.compiler.is_compiling() and not transformed():  # there tensors have no addresses
        ended = not torch.is_inference_mode_enabled() and any(x.is_inference() for x in written.values())
        require(not ended, "state or out is an inference tensor; expected torch.inference_mode(), since it is written")
        present = {name: x for name, x in (tensors | written).items() if x is not None}
        if all(map(has_address, present.values())):
            spans = ((*_span(x), name, name in written) for name, x in present.items())
            check_apart(spans, "memory of its own, since it is written")


def check_apart(spans: Iterable[tuple[int, int, str, bool]], expected: str) -> None:
    """Raises InputError, which says what is expected, if a tensor that is written shares memory with another.

    spans: of each tensor its first address, that after its last, its name, and whether it is written."""
    reached, owner, writes = 0, "", False
    for start, end, name, written in sorted(spans):
        if start < reached and (written or writes):
            mine, other = (name, owner) if written else (owner, name)
            raise InputError(f"{mine} shares memory with {other}; expected {expected}")
        if end > reached:
            reached, owner, writes = end, name, written


def _span(x: Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte of a tensor and of the byte after its last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize * (x.numel() > 0)
