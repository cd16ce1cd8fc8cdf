"""Whether a fast path may use a module's weights instead of calling the module."""

from typing import TypeGuard, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def is_plain(module: nn.Module, kind: type[M]) -> TypeGuard[M]:
    """Whether calling the module does exactly what its class `kind` does.

    False for a module with a hook, an adapter, a parametrization or a `forward` of its own, which have to run. Hooks
    registered for all modules at once, which serve profiling, are not considered.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is kind and not hooks and "forward" not in module.__dict__
