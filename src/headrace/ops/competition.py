"""Registers a backend's log gate of head competition, with scores of each head's own q or k, as a PyTorch operator.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key dimension per head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import derivatives
from .operator import define, library

INPUTS = "Tensor x, Tensor weight, str kind, float temperature, float offset, bool identity"


class Activation(NamedTuple):
    """How scores become log gates."""

    kind: str  # "softmax" over the heads, "null", the same with one more logit of 0, or "sigmoid"
    temperature: float  # divides the scores
    offset: float  # subtracted from a sigmoid's scores
    identity: bool  # whether gates are divided by their value at zero scores


def register(backend: str, name: str, key: str, forward: Callable, backward: Callable) -> Callable[..., Tensor]:
    """Returns run(heads [B, T, Hq, K], weight [H, K], activation) -> log gate [B, T, H], which is differentiable.

    Args:
        backend: name of the backend in errors.
        name: name of the operator in `torch.ops.headrace`.
        key: dispatch key that the implementation is registered for.
        forward: forward(x, weight, activation) -> the log gate in float32.
        backward: backward(d_log_gate, log_gate, x, weight, activation) -> gradients to x and weight, the latter in
            float32.
    """

    def real_forward(x: Tensor, weight: Tensor, *activation: Any) -> Tensor:
        return forward(x, weight, Activation(*activation))

    def real_backward(d_log_gate: Tensor, log_gate: Tensor, x: Tensor, weight: Tensor, *activation: Any) -> Any:
        return backward(d_log_gate, log_gate, x, weight, Activation(*activation))

    compete = define(name, f"({INPUTS})", 1, real_forward, _fake_forward, key)
    arguments = f"(Tensor d_log_gate, Tensor log_gate, {INPUTS})"
    gradient = define(f"{name}_backward", arguments, 2, real_backward, _fake_backward, key)

    @derivatives.first_order(f"the {backend} competition", "; expected backend='torch'")
    def gradients(ctx: Any, d_log_gate: Tensor) -> tuple[Tensor | None, ...]:
        log_gate, x, weight = ctx.saved_tensors  # accessed once, as in convolution.py
        d_x, d_weight = gradient(d_log_gate, log_gate, x, weight, *ctx.activation)
        return d_x, d_weight.to(weight.dtype), *(None for _ in ctx.activation)

    torch.library.register_autograd(f"headrace::{name}", gradients, setup_context=_save, lib=library)

    def run(heads: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        return compete(heads, weight, *activation)

    return run


def refuses(*arguments: Any) -> str | None:
    """Returns why no operator can compute the log gate, or None."""
    if derivatives.transformed():
        return "it supports neither transforms of torch.func nor forward-mode differentiation"
    return None


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, *ctx.activation = inputs
    ctx.save_for_backward(output, x, weight)


def _fake_forward(x, weight, *activation):
    return x.new_empty((*x.shape[:2], len(weight)), dtype=torch.float32)


def _fake_backward(d_log_gate, log_gate, x, weight, *activation):
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return d_x, weight.new_empty(weight.shape, dtype=torch.float32)
