"""Registers a backend's log gate of head competition, with scores of each head's own q or k, as a PyTorch operator.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key dimension per head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import derivatives
from .operator import define, library

INPUTS = "Tensor x, Tensor weight, str kind, float temperature"


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
        forward: forward(x, weight, kind, temperature, offset) -> the log gate, and that of zero scores [H], in float32.
        backward: backward(d_log_gate, log_gate, x, weight, kind, temperature) -> gradients to x and weight, the latter
            in float32.
    """
    compete = define(name, f"({INPUTS}, float offset)", 2, forward, _fake_forward, key)
    arguments = f"(Tensor d_log_gate, Tensor log_gate, {INPUTS})"
    gradient = define(f"{name}_backward", arguments, 2, backward, _fake_backward, key)

    @derivatives.first_order(f"the {backend} competition", "; expected backend='torch'")
    def gradients(ctx: Any, d_log_gate: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        log_gate, x, weight = ctx.saved_tensors  # accessed once, as in convolution.py
        d_x, d_weight = gradient(d_log_gate, log_gate, x, weight, *ctx.settings)
        return d_x, d_weight.to(weight.dtype), None, None, None

    torch.library.register_autograd(f"headrace::{name}", gradients, setup_context=_save, lib=library)

    def run(heads: Tensor, weight: Tensor, activation: Activation) -> Tensor:
        *settings, identity = activation
        log_gate, level = compete(heads, weight, *settings)
        return log_gate - level.detach() if identity else log_gate

    return run


def refuses(*arguments: Any) -> str | None:
    """Returns why no operator can compute the log gate, or None."""
    if derivatives.transformed():
        return "it supports neither transforms of torch.func nor forward-mode differentiation"
    return None


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, *ctx.settings, _ = inputs
    ctx.save_for_backward(output[0], x, weight)
    ctx.set_materialize_grads(False)  # the log gate of zero scores has no gradient


def _fake_forward(x, weight, *settings):
    return tuple(x.new_empty((*shape, len(weight)), dtype=torch.float32) for shape in (x.shape[:2], ()))


def _fake_backward(d_log_gate, log_gate, x, weight, *settings):
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return d_x, weight.new_empty(weight.shape, dtype=torch.float32)
