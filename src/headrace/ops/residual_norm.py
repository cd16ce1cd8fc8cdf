"""`ResidualNorm`, what stands before a branch of a residual block: the sum of the residual stream and of the last
branch, and its RMSNorm (arXiv 1910.07467).

Dimensions: B batch, T tokens, D hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import derivatives
from .autograd import add_gradient, define
from .call import schema


class ResidualNorm(NamedTuple):
    """The arguments of (s, n) with s = x + y and n = s / sqrt(mean(s²) + eps) · weight."""

    x: Tensor  # [B, T, D]
    y: Tensor | None  # [B, T, D]; None: s is x
    weight: Tensor  # [D]
    eps: float
    dtype: torch.dtype  # of n

    def results(self) -> tuple[Tensor, Tensor]:
        """Returns an empty tensor for s, without elements if it is x, and one for n."""
        added = None if self.y is None else torch.promote_types(self.x.dtype, self.y.dtype)
        s = self.x.new_empty(0) if added is None else _like(self.x, added)
        return s, _like(self.x, self.dtype)


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


GRADIENT = "(Tensor? d_s, Tensor d_n, Tensor s, Tensor weight, float eps, ScalarType dtype)"


def register(
    name: str, key: str, what: str, forward: Callable, backward: Callable
) -> Callable[[ResidualNorm], tuple[Tensor, Tensor]]:
    """Returns a differentiable function from a ResidualNorm to (s, n).

    Args:
        name: name of the operator in `torch.ops.headrace`.
        key: dispatch key that the implementation is registered for.
        what: name of the function in errors.
        forward: forward(call) -> (s, n), where s has no elements if it is x.
        backward: backward(d_s or None, d_n, s, weight, eps, dtype) -> the gradient to s in its dtype; the same in
            `dtype`, without elements if that is the dtype of s; and the gradient to the weight in float32.
    """
    run = define(
        name, f"({schema(ResidualNorm)})", 2, lambda *args: forward(ResidualNorm(*args)),
        lambda *args: ResidualNorm(*args).results(), key,
    )  # fmt: skip
    gradient = define(f"{name}_backward", GRADIENT, 3, backward, _fake_gradients, key)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        call = ResidualNorm(*inputs)
        ctx.eps, ctx.of_y = call.eps, None if call.y is None else call.y.dtype
        ctx.save_for_backward(call.x if call.y is None else output[0], call.weight)
        ctx.set_materialize_grads(False)

    @derivatives.first_order(what, "; expected float64, which PyTorch computes")
    def differentiate(ctx: Any, d_s: Tensor | None, d_n: Tensor | None) -> tuple[Tensor | None, ...]:
        s, weight = ctx.saved_tensors  # accessed once, because activation checkpointing recomputes them at each access
        if d_n is None:
            return d_s, None if ctx.of_y is None else d_s, None, None, None
        d_s, narrow, d_weight = gradient(d_s, d_n, s, weight, ctx.eps, ctx.of_y or s.dtype)
        d_y = None if ctx.of_y is None else narrow if narrow.numel() else d_s
        return d_s, d_y, d_weight.to(weight.dtype), None, None

    def with_x(results: Any, inputs: tuple) -> Any:
        return results if inputs[1] is not None else (inputs[0].view_as(inputs[0]), results[1])

    add_gradient(run, differentiate, save, with_x)

    def call_operator(call: ResidualNorm) -> tuple[Tensor, Tensor]:
        s, n = run(*call)
        return call.x if call.y is None and not s.numel() else s, n

    return call_operator


def _fake_gradients(d_s, d_n, s, weight, eps, dtype):
    narrow = s.new_empty(0, dtype=dtype) if dtype == s.dtype else _like(s, dtype)
    return _like(s, s.dtype), narrow, _like(weight, torch.float32)
