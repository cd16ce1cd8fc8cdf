"""The interface of a backend."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .call import Call


class Backend(NamedTuple):
    """An implementation of the recurrence."""

    run: Callable[[Call], tuple[Tensor, Tensor]]  # computes (out, final state); differentiable
    missing: Callable[[], str | None]  # returns why the backend is not available on this machine, or None
    refuses: Callable[[Call], str | None]  # returns why the backend cannot compute a call, or None
    about: Callable[[], str]  # returns the backend's version
    steps: bool  # whether `step` should use the backend for a single token
