"""Errors for derivatives that a hand-written backward does not have. PyTorch by itself would return zeros for them.

`torch.autograd.function.once_differentiable` does not suffice: if the incoming gradient is a constant, like that of a
sum, it returns a constant without an error, and a gradient penalty has no effect.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..utils.errors import InputError


def first_order(what: str, instead: str = "") -> Callable[[Callable], Callable]:
    """Decorates the backward of an autograd function: raises InputError if its result is to be differentiated again.

    what: name of the function in the error; instead: end of the error sentence, which names an alternative."""

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def run(ctx, *grads):
            if torch.is_grad_enabled():  # in a backward, true only under create_graph=True
                raise InputError(f"{what} has no second derivative, which create_graph=True asks for{instead}")
            return backward(ctx, *grads)

        return run

    return decorate


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def transforms_reason() -> str | None:
    """Returns why a function without rules for transforms cannot run now, or None."""
    return "it supports neither transforms of torch.func nor forward-mode differentiation" if transformed() else None


def check_transforms(what: str, instead: str, inputs: tuple) -> None:
    """Raises InputError under transforms that need more than a backward: all except `torch.func.vmap`."""
    if forward_ad._current_level >= 0:
        raise InputError(f"{what} has no forward-mode derivative, which torch.func.jvp asks for{instead}")
    if any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise InputError(f"{what} has no gradient inside a transform of torch.func{instead}")


def refuse_transforms(what: str) -> None:
    """Raises InputError under torch.func and forward-mode differentiation."""
    if transformed():
        raise InputError(f"{what} has no rules for torch.func or forward-mode derivatives; expected torch.autograd")


def apply_function(function: type[torch.autograd.Function], what: str, *inputs):
    """Returns function.apply(*inputs), where `refuse_transforms` lets it."""
    refuse_transforms(what)
    return function.apply(*inputs)


def recorded() -> bool:
    """Whether PyTorch records its operators, in a graph or a trace. A launch of a kernel would not be recorded."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return traced or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def dispatched() -> bool:
    """Whether PyTorch has to see every operator: in graphs, traces, transforms and dispatch modes."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return traced or transformed() or torch._C._len_torch_dispatch_stack() > 0


def settled(x: Tensor) -> Tensor:
    """Returns x contiguous, as a copy if it is a collective's result, which has no memory before something waits."""
    return x.clone(memory_format=torch.contiguous_format) if hasattr(x, "wait") else x.contiguous()


def has_address(x: Tensor) -> bool:
    """Whether x.data_ptr() is valid: a subclass of Tensor may wrap other tensors and have no memory of its own."""
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta
