"""When a fast path may take a module's weights and leave the call of the module out."""

from torch import nn


def untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the module would do what its class `kind` does, and nothing else.

    A hook, an adapter around the module, a parametrisation or a `forward` of its own must see every token. (Hooks that
    are registered for all modules at once, which are for profiling, are not looked for.)
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is kind and not hooks and "forward" not in module.__dict__
