"""Registers a backend's short convolution, a causal depthwise convolution and its SiLU, as a PyTorch operator.

Dimensions: B batch, T tokens, C channels, N sequences, W width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import derivatives
from .autograd import add_gradient, define
from .modules import is_plain
from .sequences import Sequences

INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor history, Tensor? cu_seqlens"


def register(backend: str, name: str, key: str, forward: Callable, backward: Callable) -> Callable[..., Tensor]:
    """Returns run(conv, x [B, T, C], history [N, W − 1, C], sequences) -> y [B, T, C], which is differentiable.

    Args:
        backend: name of the backend in errors.
        name: name of the operator in `torch.ops.headrace`.
        key: dispatch key that the implementation is registered for.
        forward: forward(x, weight [C, 1, W], bias [C] or None, history, cu_seqlens) -> y.
        backward: backward(d_y, x, weight, bias, history, cu_seqlens) -> gradients to x, weight, bias (in any case) and
            history, in any dtype.
    """

    def real_backward(d_y: Tensor, *given: Any) -> tuple[Tensor, ...]:
        x, weight, _, history, _ = given
        found = zip(backward(d_y, *given), (x, weight, weight, history), strict=True)
        return tuple(grad.to(like.dtype) for grad, like in found)

    convolve = define(name, f"({INPUTS})", 1, forward, like, key)
    gradient = define(f"{name}_backward", f"(Tensor d_y, {INPUTS})", 4, real_backward, _fake_backward, key)

    @derivatives.first_order(f"the {backend} convolution", "; expected float64, for which PyTorch convolves")
    def gradients(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors  # accessed once, because activation checkpointing recomputes them at each access
        d_x, d_weight, d_bias, d_history = gradient(d_y, *given)
        return d_x, d_weight, None if given[2] is None else d_bias, d_history, None

    add_gradient(convolve, gradients, _save)

    def run(conv: nn.Conv1d, x: Tensor, history: Tensor, sequences: Sequences) -> Tensor:
        return convolve(x, conv.weight, conv.bias, history, sequences.cu_seqlens)

    return run


def unsupported_reason(conv: nn.Conv1d) -> str | None:
    """Returns why no operator can take the place of the module, or None."""
    if not is_plain(conv, nn.Conv1d):
        return f"a hook, a parametrisation or an adapter of {type(conv).__name__} would not run"
    if derivatives.transformed():
        return "it supports neither transforms of torch.func nor forward-mode differentiation"
    return None


def like(x: Tensor, *_) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _fake_backward(d_y, x, weight, bias, history, cu_seqlens):
    return like(x), like(weight), weight.new_empty(len(weight)), like(history)
