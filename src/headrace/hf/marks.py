"""Marks: the states of a cache at earlier columns, to which it can go back.

Dimensions: N sequences, L tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.attention.attention import AttentionState, valid_columns
from ..layers.base import may_write
from ..layers.blocks.stack import PositionState
from ..layers.linear.token import MixerState
from ..ops.checks import require


@dataclass(frozen=True)
class Marks:
    """Which marks a cache makes by itself.

    Over `bytes`, it gives up marks where they are dense for their distance from the end, first the older of two that
    are as dense: what is left is spread over all columns, ever closer towards the end."""

    every: int | None = None  # a mark at each multiple of so many columns
    recent: int = 0  # marks at the ends of so many last calls
    bytes: int | None = None  # of the marks that the cache makes by itself, together; None: no limit
    carry: int | None = None  # pending columns that one call reads with its own; more are read before. None: any

    def __post_init__(self) -> None:
        for name, least in {"every": 1, "recent": 0, "bytes": 1, "carry": 0}.items():
            value = getattr(self, name)
            whole = value is None or (type(value) is int and value >= least)
            require(whole, f"Marks({name}={value!r}); expected a whole number of at least {least}")
        require(self.recent is not None, "Marks(recent=None); expected a whole number of at least 0")


KINDS = ("recent", "every", "own")  # marks of the ends of calls, of multiples of columns, and of `mark`


class Mark(NamedTuple):
    """The states at a column. Keys and values are those of the cache."""

    column: int
    states: list[Any]  # copies; for softmax attention, whether there was padding
    kind: str

    @property
    def bytes(self) -> int:
        return state_bytes(self.states)

    def of(self, kind: str) -> "Mark":
        """Returns the mark, which is also of another kind."""
        return self._replace(kind=max(kind, self.kind, key=KINDS.index))

    def restored(self, states: list[Any], removed: int) -> list[Any]:
        """Returns the states at the column. states: those `removed` columns later, which are overwritten."""
        pairs = zip(self.states, states, strict=True)
        return [cropped(now, removed, old) if is_growing(now) else _restored(old, now) for old, now in pairs]

    def changed(self, function: Callable[[Tensor], Tensor]) -> "Mark":
        """Returns the mark with the function of each tensor."""
        return self._replace(states=[s if isinstance(s, bool) else copied(s, function) for s in self.states])


def mark(column: int, states: list[Any], kind: str) -> Mark:
    """Marks a column. states: those at the column, which are copied but for keys and values."""
    return Mark(column, [s.valid is not None if is_growing(s) else copied(s) for s in states], kind)


def state_bytes(states: list[Any]) -> int:
    """Returns the bytes of a mark of these states."""
    fixed = [s for s in states if isinstance(s, tuple) and not is_growing(s)]
    return sum(x.nbytes for s in fixed for x in s if isinstance(x, Tensor))


def is_growing(state: Any) -> bool:
    """Whether a state has numbers of each token, and can be cropped."""
    return isinstance(state, AttentionState)


def can_crop(states: list[Any]) -> bool:
    """Whether states at any earlier column are parts of these."""
    others = [s for s in states if not is_growing(s)]
    return len(others) < len(states) and all(s is None or isinstance(s, PositionState) for s in others)


def crop(states: list[Any], removed: int) -> list[Any]:
    """Returns the states `removed` columns earlier, for states that `can_crop`."""
    short = [cropped(s, removed) if is_growing(s) else s for s in states]
    tokens = next(s for s in short if is_growing(s)).seen
    return [PositionState(tokens) if isinstance(s, PositionState) else s for s in short]


def cropped(state: AttentionState, removed: int, padded: bool | None = None) -> AttentionState:
    """Returns the keys and values without the last columns, in the same memory. padded: whether there is a mask; None:
    if there is padding."""
    columns = state.k.shape[1] - removed
    k, v = state.k[:, :columns], state.v[:, :columns]
    valid = valid_columns(k, None if state.valid is None else state.valid[:, :columns])
    padded = not valid.all() if padded is None else padded
    return AttentionState(k, v, valid if padded else None, state.room)


def spared(states: list[Any] | None) -> list[Any] | None:
    """Returns states that can be written into while these stay as they are: copies, but for keys and values."""
    return states and [s if is_growing(s) else copied(s) for s in states]


def copied(state: Any, function: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """Returns a state with the function of each tensor."""
    if state is None:
        return None
    return type(state)(*(function(x) if isinstance(x, Tensor) else x for x in state))


def _restored(old: Any, now: Any) -> Any:
    """Copies a state, where it can be into the memory of the present one: a program of the native backend is bound to
    it. Only a linear mixer's state has memory that nothing else refers to."""
    if isinstance(now, MixerState) and old is not None and all(map(_fits, old, now)):
        for x, y in zip(old, now, strict=True):
            if y is not None:
                y.copy_(x)
        return now
    return copied(old)


def _fits(old: Tensor | None, now: Tensor | None) -> bool:
    if old is None or now is None:
        return old is now
    same = (old.shape, old.dtype, old.device) == (now.shape, now.dtype, now.device)
    return same and not old.requires_grad and may_write([now])


def thinned(marks: list[Mark], policy: Marks, columns: int) -> list[Mark]:
    """Returns the marks that the policy keeps."""
    recent = [m.column for m in marks if m.kind == "recent"]
    kept = [m for m in marks if m.kind != "recent" or m.column in recent[len(recent) - policy.recent :]]
    while policy.bytes is not None and sum(m.bytes for m in kept if m.kind != "own") > policy.bytes:
        places = [0, *(m.column for m in kept), columns]
        gaps = {i: (places[i + 2] - places[i]) / (columns - places[i]) for i, m in enumerate(kept) if m.kind != "own"}
        del kept[min(gaps, key=lambda i: (gaps[i], i))]
    return kept
