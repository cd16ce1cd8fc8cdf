"""What a backend is."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .call import Call


class Backend(NamedTuple):
    """One way to compute a Call."""

    run: Callable[[Call], tuple[Tensor, Tensor]]  # (out, final state), with a gradient
    missing: Callable[[], str | None]  # why it is not available here, or None
    refuses: Callable[[Call], str | None]  # why it cannot compute a call, or None
    about: Callable[[], str]  # its version
    steps: bool  # whether it is also the quickest for a single token
