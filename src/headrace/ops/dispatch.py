"""The table of backends, and the choice of the backend that computes an operation."""

import os
from typing import Any

from torch import Tensor, nn

from ..utils.errors import InputError, nearest
from .backends.base import OPERATIONS, Backend, HasBackend
from .backends.fla import op as fla_op
from .backends.native import op as native_op
from .backends.onnx import op as onnx_op
from .backends.torch import op as torch_op
from .backends.triton import op as triton_op
from .call import Call
from .checks import as_bounds, check_form, check_rule, check_shapes, require

# In order of preference: "auto" takes the first backend that is available and does not refuse the arguments. Inside
# torch.onnx.export that is onnx, on a CPU native or torch, on a Hopper GPU triton, on another GPU fla or torch.
BACKENDS: dict[str, Backend] = {
    "onnx": onnx_op.BACKEND, "native": native_op.BACKEND, "triton": triton_op.BACKEND, "fla": fla_op.BACKEND,
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
    """Sets the backend of all layers of a module. Modules without a choice of backend (scans, rwkv7, gla-outer, softmax
    attention) are left as they are.

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


def backends(
    q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, **kwargs: Any
) -> dict[str, dict[str, str | None]] | str:
    """Lists what each backend computes, or names the backend of a call.

    Args:
        q, k, v: as in `linear_attention`, all three or none.
        kwargs: the other arguments of `linear_attention`. They are checked as there, except for values (check=True),
            the memory that form="parallel" needs, and context parallelism.

    Returns:
        Without arguments, a dict by backend of dicts by operation, with None, or the reason why the backend does not
        compute the operation here. With the arguments of a call, the name of the backend that would compute it.

    Raises:
        InputError: for arguments that `linear_attention` refuses, and for a backend given by name that cannot compute
            the call.
    """
    if q is None and k is None and v is None and not kwargs:
        return {name: {operation: unavailable(name, operation) for operation in OPERATIONS} for name in BACKENDS}
    if q is None or k is None or v is None:
        raise InputError("backends needs q, k and v to name the backend of a call; expected all three, or no arguments")
    return _backend_of(q, k, v, kwargs)


# The arguments of `linear_attention` besides q, k and v, with its defaults.
TENSORS = Call._fields[3:10]
OTHERS: dict[str, Any] = {
    "rule": "add", "normalize": False, "scale": None, "form": "chunkwise", "chunk_size": None, "backend": "auto",
    "check": False,
}  # fmt: skip


def _backend_of(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> str:
    """Returns the name of the backend that computes a call of `linear_attention`."""
    for name in given:
        require(
            name in TENSORS or name in OTHERS,
            f"linear_attention has no argument {name!r}; did you mean {nearest(name, [*TENSORS, *OTHERS])!r}?",
        )
    tensors: dict[str, Any] = {name: given.get(name) for name in TENSORS}
    tensors["cu_seqlens"] = as_bounds(tensors["cu_seqlens"])
    others = {name: given.get(name, default) for name, default in OTHERS.items()}
    bonus, form, chunk_size = tensors["bonus"], others["form"], others["chunk_size"]
    check_form(form, chunk_size)
    check_rule(others["rule"], bonus, others["normalize"])
    check_shapes(q, k, v, tensors, others["normalize"], ("B", "T"))
    if form == "recurrent":
        refuse_recurrent(others["backend"])
        return "torch"
    if form == "parallel":  # one chunk, of the longest sequence
        bounds = tensors["cu_seqlens"]
        chunk_size = v.shape[1] if bounds is None else max(int(bounds.diff().max()), 1)
    del tensors["bonus"]
    call = Call(q, k, v, **tensors, delta=others["rule"] == "delta", scale=1.0, chunk_size=chunk_size)
    chosen = choose("linear_attention", others["backend"], call)
    return next(name for name, backend in BACKENDS.items() if backend.linear_attention is chosen)


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
    if name == "auto":
        for backend in BACKENDS.values():
            kernel = getattr(backend, operation)
            if kernel is None or backend.missing() is not None or backend.on_request(*arguments):
                continue
            if kernel.unsupported_reason(*arguments) is None:
                return kernel
        raise InputError(f"no backend has {operation} for these arguments")
    reason = unavailable(name, operation) or (kernel := getattr(_named(name), operation)).unsupported_reason(*arguments)
    if reason is not None:
        raise InputError(f"backend={name!r} cannot run here: {reason}")
    return kernel


def _named(name: str) -> Backend:
    if name not in BACKENDS:
        raise InputError(f"backend={name!r} is unknown; expected 'auto' or one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
