"""The table of backends, and the choice of the backend that computes an operation."""

import os
from typing import Any

from torch import Tensor, nn

from ..utils.errors import InputError
from .backend import OPERATIONS, Backend, HasBackend
from .call import Call
from .fla import op as fla_op
from .native import op as native_op
from .onnx import op as onnx_op
from .torch import op as torch_op
from .triton import op as triton_op

# In order of preference: "auto" takes the first backend that is available and does not refuse the arguments. Inside
# torch.onnx.export that is onnx, on a CPU native or torch, on a GPU fla or torch. No GPU has run the kernels of triton
# yet, so they run on request only.
BACKENDS: dict[str, Backend] = {
    "onnx": onnx_op.BACKEND, "native": native_op.BACKEND, "fla": fla_op.BACKEND, "triton": triton_op.BACKEND,
    "torch": torch_op.BACKEND,
}  # fmt: skip


def default_backend() -> str:
    """Returns the backend of new layers: the value of the environment variable HEADRACE_BACKEND, or "auto".

    Raises:
        InputError: if there is no backend of this name.
    """
    name = os.environ.get("HEADRACE_BACKEND") or "auto"
    if name not in ("auto", *BACKENDS):
        raise InputError(f"HEADRACE_BACKEND={name!r} is unknown; expected 'auto' or one of {', '.join(BACKENDS)}")
    return name


def set_backend(module: nn.Module, name: str) -> None:
    """Sets the backend of all layers of a module.

    Args:
        module: a layer or a model.
        name: "auto" or a backend. PyTorch computes the operations that this backend does not have.

    Raises:
        InputError: if there is no backend of this name.
    """
    if name != "auto":
        _named(name)
    for layer in module.modules():
        if isinstance(layer, HasBackend):
            layer.backend = name


def backends(q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, **kwargs):
    """Lists what each backend computes, or names the backend of a call.

    Without arguments, returns {backend: {operation: None, or the reason why the backend does not compute it here}}.
    With the arguments of `linear_attention`, returns the name of the backend that would compute the call.

    Raises:
        InputError: if the backend given by name cannot compute the call.
    """
    if q is None or k is None or v is None:
        return {name: {operation: unavailable(name, operation) for operation in OPERATIONS} for name in BACKENDS}
    given: dict[str, Any] = {name: kwargs.get(name) for name in Call._fields[3:9]}
    call = Call(q, k, v, **given, delta=kwargs.get("rule") == "delta", scale=1.0, chunk_size=kwargs.get("chunk_size"))
    chosen = choose("linear_attention", kwargs.get("backend", "auto"), call)
    return next(name for name, backend in BACKENDS.items() if backend.linear_attention is chosen)


def unavailable(name: str, operation: str) -> str | None:
    """Returns why a backend does not compute an operation on this machine, or None."""
    return _named(name).missing() or (None if has(name, operation) else f"it has no {operation}")


def has(name: str, operation: str) -> bool:
    """Whether a backend implements an operation. Raises InputError for an unknown backend."""
    return getattr(_named(name), operation) is not None


def choose(operation: str, name: str, *arguments: Any) -> Any:
    """Returns the Kernel that computes an operation on these arguments.

    Raises InputError if the named backend cannot compute it, or if there is no such backend."""
    if name == "auto":
        for backend in BACKENDS.values():
            kernel = None if backend.on_request else getattr(backend, operation)
            if kernel is not None and backend.missing() is None and kernel.refuses(*arguments) is None:
                return kernel
        raise InputError(f"no backend has {operation} for these arguments")
    reason = unavailable(name, operation) or (kernel := getattr(_named(name), operation)).refuses(*arguments)
    if reason is not None:
        raise InputError(f"backend={name!r} cannot run here: {reason}")
    return kernel


def _named(name: str) -> Backend:
    if name not in BACKENDS:
        raise InputError(f"backend={name!r} is unknown; expected 'auto' or one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
