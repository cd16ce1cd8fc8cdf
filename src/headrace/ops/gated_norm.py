"""Registers a backend's gated norm, what follows a recurrence, as a PyTorch operator.

Dimensions: B batch, T tokens, H heads, V value dimension per head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import derivatives
from .operator import define, library

INPUTS = "Tensor x, Tensor? logits, Tensor? strength, Tensor? weight, Tensor? bias"
SETTINGS = "str norm, str gate, str order, float eps"


class GatedNorm(NamedTuple):
    """The arguments of a gated norm, y = norm(x) · strength · gate(logits) if the norm comes first."""

    x: Tensor  # [B, T, H, V]
    logits: Tensor | None  # of the output gate, [B, T, H, V]; None: no gate
    strength: Tensor | None  # a factor per head of the norm's result, [B, T, H]; not of a joint norm
    weight: Tensor | None  # of the norm: rms, [V]; rms-joint and group, [H · V]
    bias: Tensor | None  # of the group norm, [H · V]
    norm: str  # read.norm of the spec
    gate: str  # activation of the gate: silu or sigmoid
    order: str  # read.order of the spec
    eps: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.x.dtype if self.logits is None else torch.promote_types(self.x.dtype, self.logits.dtype)


def register(backend: str, name: str, key: str, forward: Callable, backward: Callable) -> Callable[..., Tensor]:
    """Returns run(call) -> y [B, T, H, V], which is differentiable.

    Args:
        backend: name of the backend in errors.
        name: name of the operator in `torch.ops.headrace`.
        key: dispatch key that the implementation is registered for.
        forward: forward(call) -> y.
        backward: backward(d_y, call) -> gradients to the five tensors, None for those that are None.
    """
    plain = define(name, f"({INPUTS}, {SETTINGS})", 1, lambda *args: forward(GatedNorm(*args)), _fake, key)
    arguments = f"(Tensor d_y, {INPUTS}, {SETTINGS})"
    gradient = define(f"{name}_backward", arguments, 5, _like_inputs(backward), _like_inputs(_fake_back), key)

    @derivatives.first_order(f"the {backend} gated norm", "; expected float64, which PyTorch computes")
    def gradients(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        found = gradient(d_y, *ctx.saved_tensors, *ctx.settings)
        return *(g if x is not None else None for g, x in zip(found, ctx.saved_tensors, strict=True)), *[None] * 4

    torch.library.register_autograd(f"headrace::{name}", gradients, setup_context=_save, lib=library)
    return lambda call: plain(*call)


def _like_inputs(backward: Callable) -> Callable:
    """Converts gradients to the dtypes of the inputs, and absent gradients to empty tensors."""

    def run(d_y: Tensor, *args: Any) -> tuple[Tensor, ...]:
        call = GatedNorm(*args)
        grads = zip(backward(d_y, call), call.tensors, strict=True)
        return tuple(d_y.new_empty(0) if x is None else grad.to(x.dtype) for grad, x in grads)

    return run


def _fake(*args: Any) -> Tensor:
    call = GatedNorm(*args)
    return torch.empty_like(call.x, dtype=call.dtype, memory_format=torch.contiguous_format)


def _fake_back(d_y: Tensor, call: GatedNorm) -> list[Tensor | None]:
    return [x if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in call.tensors]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.settings = inputs[5:]
    ctx.save_for_backward(*inputs[:5])
