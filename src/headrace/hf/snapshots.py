"""Snapshots: the states of a cache at earlier columns, and the ids that it has read since. By both it goes back.

Dimensions: B batch, C columns, N sequences, L tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.attention.attention import AttentionState, valid_columns
from ..layers.base import may_write, tensors
from ..layers.blocks.stack import PositionState
from ..layers.linear.token import MixerState
from ..utils.errors import InputError

# Why ids are not kept.
EMBEDDED = "were read from embeddings, which are not kept"
COMPILED = "were read in a compiled graph, which does not keep their tokens"


class Snapshot(NamedTuple):
    """The states at a column. Keys and values are those of the cache."""

    column: int
    states: list[Any]  # copies; for softmax attention, whether there is a mask
    temporary: bool = False  # whether the next temporary snapshot takes its place

    def restored(self, states: list[Any], removed: int) -> list[Any]:
        """Returns the states at the column. states: those `removed` columns later, which are overwritten."""
        pairs = zip(self.states, states, strict=True)
        return [cropped(new, removed, old) if is_growing(new) else _restored(old, new) for old, new in pairs]


class Piece(NamedTuple):
    """The columns from `start` to `end` of a cache."""

    start: int
    end: int
    ids: Tensor | str  # [B, C]; or why they are not kept, as a sentence about "columns … to …"
    mask: Tensor | None = None  # [B, C] bool; False marks padding

    def part(self, start: int, end: int) -> "Piece":
        """Returns the columns from `start` to `end` alone."""
        if isinstance(self.ids, str):
            return Piece(start, end, self.ids)
        columns = slice(start - self.start, end - self.start)
        return Piece(start, end, self.ids[:, columns], None if self.mask is None else self.mask[:, columns])

    def joined(self, following: "Piece") -> "Piece | None":
        """Returns both pieces as one; None if one has a mask or no ids, and if the first is longer: of n columns that
        come one by one, a number is copied log₂ n times."""
        (start, middle, ids, mask), (_, end, more, other) = self, following
        if middle - start > end - middle or mask is not None or other is not None:
            return None
        if isinstance(ids, str) or isinstance(more, str):
            return None
        return Piece(start, end, torch.cat([ids, more], 1))


class Snapshots:
    """The snapshots of a cache, and the ids of all columns that it has read."""

    def __init__(self) -> None:
        self.taken: list[Snapshot] = []
        self.pieces: list[Piece] = []
        self.croppable_from = 0  # the first column that a crop of keys and values reaches

    @property
    def columns(self) -> list[int]:
        """The columns of the snapshots, in order. Column 0 is always one."""
        return sorted({0, *(each.column for each in self.taken)})

    @property
    def nbytes(self) -> int:
        """Bytes that the snapshots need in addition to the states of the cache."""
        return sum(x.nbytes for each in self.taken for x in tensors([s for s in each.states if isinstance(s, tuple)]))

    def take(self, column: int, states: list[Any], temporary: bool) -> None:
        """Adds a snapshot of the states at the last column."""
        if temporary:
            self.taken = [each for each in self.taken if not each.temporary]
        if column in [each.column for each in self.taken[-1:]]:
            self.taken[-1] = self.taken[-1]._replace(temporary=self.taken[-1].temporary and temporary)
        else:
            copies = [s.valid is not None if is_growing(s) else copied(s) for s in states]
            self.taken.append(Snapshot(column, copies, temporary))

    def add(self, start: int, end: int, ids: Tensor | None, mask: Tensor | None) -> None:
        """Adds the columns of a call: a copy of ids [B, C] and their mask. ids: None for embeddings. A compiled graph
        adds none."""
        if torch.compiler.is_compiling():
            return
        self._fill(start)
        kept = EMBEDDED if ids is None else ids.clone()
        self.pieces.append(Piece(start, end, kept, None if mask is None else mask.clone()))
        while len(self.pieces) > 1 and (joined := self.pieces[-2].joined(self.pieces[-1])):
            self.pieces[-2:] = [joined]

    def forget(self, end: int, reason: str) -> None:
        """Drops all snapshots and ids before column `end`. reason: as in `Piece`."""
        self.taken, self.pieces, self.croppable_from = [], [Piece(0, end, reason)], end

    def ids(self, start: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Returns the ids [B, C] from column `start` to `end`, at least one, and their mask if there is one.

        Raises InputError for ids that are not kept."""
        self._fill(end)
        pieces = [p.part(max(p.start, start), min(p.end, end)) for p in self.pieces if p.start < end and p.end > start]
        for piece in pieces:
            if isinstance(piece.ids, str):
                raise InputError(f"columns {piece.start} to {piece.end} {piece.ids}")
        ids = torch.cat([piece.ids for piece in pieces], 1)  # type: ignore[misc]
        if all(piece.mask is None for piece in pieces):
            return ids, None
        masks = [torch.ones_like(p.ids, dtype=torch.bool) if p.mask is None else p.mask for p in pieces]  # type: ignore[arg-type]
        return ids, torch.cat(masks, 1)

    def back(self, end: int, column: int, states: list[Any]) -> tuple[int, list[Any] | None]:
        """Returns (a column of at most `end`, the states there), from which the ids up to `end` are kept. states: those
        at the later `column`, which are overwritten."""
        nearest = next((each for each in reversed(self.taken) if each.column <= end), None)
        start = 0 if nearest is None else nearest.column
        if start < end and self.croppable_from <= end and can_crop(states):
            return end, crop(states, column - end)
        if start < end:
            self.ids(start, end)
        return start, None if nearest is None else nearest.restored(states, column - start)

    def cut(self, end: int) -> None:
        """Forgets the columns from `end` on."""
        self.taken = [each for each in self.taken if each.column <= end]
        self.pieces = [piece.part(piece.start, min(piece.end, end)) for piece in self.pieces if piece.start < end]

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function to the rows of all tensors."""
        self.taken = [
            each._replace(states=[s if isinstance(s, bool) else copied(s, function) for s in each.states])
            for each in self.taken
        ]
        self.pieces = [copied(each, function) for each in self.pieces]

    def _fill(self, end: int) -> None:
        start = self.pieces[-1].end if self.pieces else 0
        if start < end:
            self.pieces.append(Piece(start, end, COMPILED))


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


def copied(state: Any, function: Callable[[Tensor], Tensor] = torch.clone) -> Any:
    """Returns a NamedTuple with the function of each of its tensors; None for None."""
    return None if state is None else type(state)(*(function(x) if isinstance(x, Tensor) else x for x in state))


def refuse_gradient(states: list[Any]) -> None:
    """Makes a backward that reaches these states raise InputError: a reentrant checkpoint has cut them off."""

    def refuse(_: Tensor) -> None:
        raise InputError("use_reentrant=True gives no gradient to past_key_values; expected use_reentrant=False")

    for x in filter(Tensor.is_floating_point, tensors(states)):
        x.requires_grad_().register_hook(refuse)


def _restored(old: Any, new: Any) -> Any:
    """Copies a state, where it can be into the memory of the present one: a program of the native backend is bound to
    it. Only a linear mixer's state has memory that nothing else refers to."""
    if not isinstance(new, MixerState) or old is None or not all(map(_fits, old, new)):
        return copied(old)
    for x, y in zip(old, new, strict=True):
        if y is not None:
            y.copy_(x)
    return new


def _fits(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None:
        return old is new
    same = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return same and not old.requires_grad and may_write([new])
