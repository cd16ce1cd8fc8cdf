"""The table of backends, and the choice of the backend for a call."""

from torch import Tensor

from ..utils.errors import InputError
from .backend import Backend
from .call import Call
from .fla import op as fla_op
from .native import op as native_op
from .torch import op as torch_op

# In order of preference: "auto" takes the first backend that is available and does not refuse the call. On a CPU that
# is native or torch, on a GPU fla or torch.
BACKENDS: dict[str, Backend] = {"native": native_op.BACKEND, "fla": fla_op.BACKEND, "torch": torch_op.BACKEND}


def backends(q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, **kwargs):
    """Lists the backends, or names the backend of a call.

    Without arguments, returns {name: None, or the reason why the backend is not available}. With the arguments of
    `linear_attention`, returns the name of the backend that would compute the call.

    Raises:
        InputError: if the backend given by name cannot compute the call.
    """
    if q is None or k is None or v is None:
        return {name: backend.missing() for name, backend in BACKENDS.items()}
    given = {name: kwargs.get(name) for name in Call._fields[3:9]}
    call = Call(q, k, v, **given, delta=kwargs.get("rule") == "delta", scale=1.0, chunk_size=kwargs.get("chunk_size"))
    chosen = choose(call, kwargs.get("backend", "auto"))
    return next(name for name, backend in BACKENDS.items() if backend is chosen)


def choose(call: Call, name: str) -> Backend:
    """Returns the backend for a call. Raises InputError if the named backend cannot compute it."""
    if name == "auto":
        usable = (b for b in BACKENDS.values() if b.missing() is None and b.refuses(call) is None)
        return next(usable)
    if name not in BACKENDS:
        raise InputError(f"backend={name!r} is unknown; expected 'auto' or one of {', '.join(BACKENDS)}")
    reason = BACKENDS[name].missing() or BACKENDS[name].refuses(call)
    if reason is not None:
        raise InputError(f"backend={name!r} cannot run here: {reason}")
    return BACKENDS[name]
