"""The table of backends: what can compute the recurrence here, and which one a call gets."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import InputError


class Call(NamedTuple):
    """What every backend gets, in the order of its operator's schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    write_gate: Tensor | None
    read_gate: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    delta: bool
    scale: float
    chunk_size: int | None  # None: the backend's choice


class Backend(NamedTuple):
    """One way to compute a Call. `missing` says why it is not here, `refuses` why it cannot take a call, else None."""

    missing: Callable[[], str | None]
    refuses: Callable[[Call], str | None]
    run: Callable[..., tuple[Tensor, Tensor]]
    about: Callable[[], str]  # what runs, where it is here
    steps: bool  # whether it is also the quickest for a single token


# Imported when first asked for.
def _native() -> Any:
    from .backends import native_op

    return native_op


def _torch() -> Any:
    from .backends import torch_op

    return torch_op


# In order of preference: "auto" takes the first that is here and does not refuse.
BACKENDS: dict[str, Backend] = {
    "native": Backend(
        missing=lambda: _native().missing(),
        refuses=lambda call: _native().refuses(call),
        run=lambda *call: _native().run(*call),
        about=lambda: _native().about(),
        steps=True,
    ),
    "torch": Backend(
        missing=lambda: None,
        refuses=lambda call: None,
        run=lambda *call: _torch().run(*call),
        about=lambda: f"PyTorch {torch.__version__}",
        steps=False,
    ),
}


def backends(q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, **kwargs):
    """Without arguments: {name: None, or why it is not here}. With `linear_attention`'s: the name that would run."""
    if q is None or k is None or v is None:
        return {name: backend.missing() for name, backend in BACKENDS.items()}
    given = {name: kwargs.get(name) for name in Call._fields[3:9]}
    call = Call(q, k, v, **given, delta=kwargs.get("rule") == "delta", scale=1.0, chunk_size=kwargs.get("chunk_size"))
    chosen = choose(call, kwargs.get("backend", "auto"))
    return next(name for name, backend in BACKENDS.items() if backend is chosen)


def choose(call: Call, name: str) -> Backend:
    """Raises InputError where a backend asked for by name cannot take the call."""
    if name == "auto":
        usable = (b for b in BACKENDS.values() if b.missing() is None and b.refuses(call) is None)
        return next(usable)
    if name not in BACKENDS:
        raise InputError(f"backend={name!r} is unknown; expected 'auto' or one of {', '.join(BACKENDS)}")
    reason = BACKENDS[name].missing() or BACKENDS[name].refuses(call)
    if reason is not None:
        raise InputError(f"backend={name!r} cannot run here: {reason}")
    return BACKENDS[name]
