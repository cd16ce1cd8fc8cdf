"""The table of backends, and the choice of the backend that computes an operation."""

import os
from typing import Any

from torch import nn

from ..spec.record import require_name
from ..utils.errors import InputError
from .backends.base import PLUGGED, Backend, HasBackend
from .backends.native import op as native_op
from .backends.torch import op as torch_op
from .backends.triton import op as triton_op
from .checks import check_module, require

# In order of preference: "auto" takes the first backend that is available and does not refuse the arguments. Inside
# torch.onnx.export that is onnx, on a CPU native or torch, on a Hopper GPU triton, on another GPU fla or torch.
BACKENDS: dict[str, Backend] = {
    "onnx": PLUGGED["onnx"], "native": native_op.BACKEND, "triton": triton_op.BACKEND, "fla": PLUGGED["fla"],
    "torch": torch_op.BACKEND,
}  # fmt: skip


def default_backend() -> str:
    """Returns the backend of new layers: the value of the environment variable HEADRACE_BACKEND, or "auto".

    Raises:
        InputError: if there is no backend of this name.
    """
    name = os.environ.get("HEADRACE_BACKEND") or "auto"
    require_name(("auto", *BACKENDS), HEADRACE_BACKEND=name)
    return name


def set_backend(module: nn.Module, name: str) -> None:
    """Sets the backend of all layers of a module. Modules without a choice of backend (such as scans, rwkv7, gla-outer
    and softmax attention) are left as they are.

    Args:
        module: a layer or a model.
        name: "auto" or a backend. PyTorch computes the operations that this backend does not have.

    Raises:
        InputError: if there is no backend of this name.
    """
    check_module(module=module)
    require_name(("auto", *BACKENDS), backend=name)
    for layer in module.modules():
        if isinstance(layer, HasBackend):
            layer.backend = name


def refuse_recurrent(name: str) -> None:
    """Raises InputError for a backend without form="recurrent", which PyTorch's operations alone have."""
    require(
        name in ("auto", "torch"),
        f"backend={name!r} cannot run here: it has no form='recurrent'; expected backend='torch' or 'auto'",
    )


def unavailable(name: str, operation: str) -> str | None:
    """Returns why a backend does not compute an operation on this machine, or None."""
    return _named(name).missing() or (None if has(name, operation) else f"it has no {operation}")


def has(name: str, operation: str) -> bool:
    """Whether a backend implements an operation. Raises InputError for an unknown backend."""
    return getattr(_named(name), operation) is not None


def choose(operation: str, name: str, *arguments: Any) -> Any:
    """Returns the Kernel that computes an operation on these arguments.

    Raises InputError if the named backend cannot compute it, or if there is no such backend."""
    require_name(("auto", *BACKENDS), backend=name)
    if name == "auto":
        for backend in BACKENDS.values():
            kernel = getattr(backend, operation)
            there = kernel is not None and backend.missing() is None and not backend.on_request(*arguments)
            if there and kernel.unsupported_reason(*arguments) is None:
                return kernel
        raise InputError(f"no backend has {operation} for these arguments")
    reason = unavailable(name, operation) or (kernel := getattr(_named(name), operation)).unsupported_reason(*arguments)
    require(reason is None, f"backend={name!r} cannot run here: {reason}")
    return kernel


def _named(name: str) -> Backend:
    require_name(BACKENDS, backend=name)
    return BACKENDS[name]
