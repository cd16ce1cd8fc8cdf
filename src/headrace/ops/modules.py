"""Whether a fast path may use a module's weights instead of calling it, and whether anything looks inside a module."""

from typing import TypeGuard, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def is_plain(module: nn.Module, kind: type[M]) -> TypeGuard[M]:
    """Whether calling the module does exactly what its class `kind` does.

    False for a module with a hook, an adapter, a parametrization or a `forward` of its own, which have to run. Hooks
    of all modules at once, which serve profiling, are not considered."""
    return type(module) is kind and not _hooked(module)


def is_watched(module: nn.Module) -> bool:
    """Whether hooks or classes that neither PyTorch nor headrace defines, such as adapters, see the tensors in it."""
    own = ("torch.", "headrace.")
    return any(_hooked(each) or not type(each).__module__.startswith(own) for each in module.modules())


def _hooked(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__
