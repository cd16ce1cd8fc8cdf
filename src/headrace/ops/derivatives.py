"""What a hand-written gradient has no derivative of is refused in one sentence: left alone, PyTorch gives zeros.

`torch.autograd.function.once_differentiable` is not enough. Where the incoming gradient is a constant, as that of a sum
is, it returns the outgoing one as a constant too, and a gradient penalty counts for nothing.
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..utils.errors import InputError


def first_order(what: str, instead: str = "") -> Callable[[Callable], Callable]:
    """For backward(ctx, *grads) of an autograd function: raises InputError where its results are to be differentiated.

    what: the name of the function to a user; instead: the end of the sentence, which names what has all derivatives."""

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def run(ctx, *grads):
            if torch.is_grad_enabled():  # in a backward, under create_graph=True alone
                raise InputError(f"{what} has no second derivative, which create_graph=True asks for{instead}")
            return backward(ctx, *grads)

        return run

    return decorate


def transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is under way."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def check_transforms(what: str, instead: str, inputs: tuple) -> None:
    """Raises InputError under transforms that a backward alone cannot serve: all but `torch.func.vmap`."""
    if forward_ad._current_level >= 0:
        raise InputError(f"{what} has no forward-mode derivative, which torch.func.jvp asks for{instead}")
    if any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise InputError(f"{what} has no gradient inside a transform of torch.func{instead}")


def apply_function(function: type[torch.autograd.Function], what: str, *inputs):
    """function.apply(*inputs); raises InputError in transforms of torch.func, for which it has no rules."""
    if transformed():
        raise InputError(f"{what} has no rules for torch.func or forward-mode derivatives; expected torch.autograd")
    return function.apply(*inputs)


def has_address(x: Tensor) -> bool:
    """Whether x can be read at its address: a subclass of Tensor may be made of others and have none."""
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta
