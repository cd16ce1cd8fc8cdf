"""The interface of a backend."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...utils.tables import Table

Prepared = Callable[..., tuple[Tensor, Tensor]]


class Kernel(NamedTuple):
    """A backend's implementation of an operation. All functions take the operation's arguments."""

    run: Callable[..., Any]
    # Returns why the backend cannot compute these arguments, or None.
    unsupported_reason: Callable[..., str | None] = lambda *arguments: None
    # Of linear_attention: which of "bonus", "normalize" and "queries" (several for each state) `run` takes in a call;
    # rewrite.py expresses the others.
    extras: tuple[str, ...] = ()
    # For `step`: returns a function (tensors, into, state, out, scale) -> (out, next state) for all tensors with the
    # signature of these (see ../prepared.py), or None. tensors: q to read_gate, as in Call; into: `state` in place.
    prepare: Callable[..., Prepared | None] | None = None


class HasBackend:
    """A layer whose recurrence a backend computes: the named one, or with "auto" the first that can."""

    backend: str


class Backend(NamedTuple):
    """A row of the table of backends.

    None for what a backend does not have: `linear_attention` alone is enough."""

    missing: Callable[[], str | None]  # returns why the backend is not available on this machine, or None
    about: Callable[[], str]  # returns the backend's version
    linear_attention: Kernel  # (call) -> (out, final state); differentiable
    step: Kernel | None = None  # (call without token dimension, in_place) -> (out, state)
    # Returns whether only its name chooses the backend for these arguments of an operation, and "auto" does not.
    on_request: Callable[..., bool] = lambda *arguments: False


PLUGGED: Table[Backend] = Table("backends")  # that plug-ins have; dispatch.py gives them their places
OPERATIONS = Backend._fields[2:4]
