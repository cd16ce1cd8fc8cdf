"""The context in which the tokens of a row are split over processes. A plug-in enters it with this process's part, and
computes what crosses the borders of parts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...utils.errors import InputError
from ...utils.tables import Table

# The last is the present one. Not a ContextVar: autograd computes checkpoints again in threads of its own.
_active: list[Any] = []
_computed = WeakKeyDictionary[Any, Any]()  # the context of a module's last forward
PARALLEL: Table[Any] = Table("parallel")  # of the plug-in, names that this module has too


def __getattr__(name: str) -> Any:
    if name not in PARALLEL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return PARALLEL[name]


@contextmanager
def within(part: Any) -> Iterator[None]:
    """Enters the context with a part, or None: tokens are then not split."""
    _active.append(part)
    try:
        yield
    finally:
        _active.pop()


def recomputed(module: Any) -> AbstractContextManager[None] | None:
    """Notes the context of a module's forward. In a backward that computes the module again, as checkpoints do, returns
    the context of its last forward if the present one differs; otherwise None."""
    if torch.compiler.is_compiling() or not (_active or _computed):
        return None
    part = current()
    if torch._C._current_graph_task_id() >= 0:  # in a backward
        return None if (last := _computed.get(module)) is part else within(last)
    _computed[module] = part
    return None


def current() -> Any:
    """The part of the innermost active `context_parallel`, a `SequenceShard`, or None."""
    return _active[-1] if _active else None


def refuse_parts(module: Any) -> None:
    """Raises InputError under context_parallel, for a module that needs all tokens of a row."""
    if current() is not None:
        kind = type(module).__name__
        raise InputError(f"context_parallel cannot split the tokens of {kind}; expected mixers of linear attention")
