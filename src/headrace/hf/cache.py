"""The cache of a headrace model between forward passes, with the interface of transformers' caches."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..layers.linear.token import MixerState
from ..ops.checks import require
from ..utils.errors import InputError
from .cache_layers import layer_of
from .marks import Mark, Marks, can_crop, copied, crop, mark, state_bytes, thinned
from .record import Record, has_ids_alone

# What transformers calls the cache in arguments and outputs: "cache" from 5.24 on, "past_key_values" before.
NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
CROP_REMOVES = "tokens_to_remove" in inspect.signature(Cache.crop).parameters
# Why tokens are not kept.
ELSEWHERE = "were read elsewhere, and their states set"
EMBEDDED = "were read from embeddings, which are kept only with `marks`"
PACKED = "were read as packed sequences"


class HeadraceCache(Cache):
    """The states of all layers, and the number of input columns that the states cover, padding included.

    The cache also keeps the tokens that it has read, so that it can go back: `rewind` forgets the last columns. A state
    of one size does not have earlier states, so the cache goes back to a mark (`mark`, or those that `marks` asks for;
    column 0 is always one), and the tokens from there on are *pending*: the model reads them with those of the next
    call. Keys and values of softmax attention are cropped.

    `layers` has an object for each layer of the model, with transformers' names, of what the cache keeps of it.
    transformers' DynamicCache is not used, because it drops the state of a recurrence without a convolution and rounds
    states to the precision of the first one written. The states belong to the cache and may be updated in place; to
    continue twice from the same state, copy the cache with copy.deepcopy.

    Args:
        marks: which marks the cache makes by itself; None: none.
    """

    def __init__(self, marks: Marks | None = None) -> None:
        super().__init__(layers=[])
        self.marks = marks
        self.counts: list[int] = []  # number of states of each layer of the model that has read
        self.reset()

    def reset(self) -> None:
        """Forgets all states, as before the first token."""
        self._states: list[Any] | None = None  # the state of a layer is None before its first token
        self.columns = 0
        self.pending = 0  # number of last columns that the states do not cover
        self.drafts: list[tuple[int, int]] = []  # (proposed, accepted) tokens of each call of assisted generation
        self._record = Record()
        self._marks: list[Mark] = []
        self._due: set[int] = set()  # columns to mark when they are read
        self._floor = 0  # the first column that a crop of keys and values reaches

    @property
    def states(self) -> list[Any] | None:
        """The states of all layers; None before the first token. Raises InputError while tokens are pending."""
        self._refuse_pending("the states do not cover them")
        return self._states

    @states.setter
    def states(self, states: list[Any] | None) -> None:
        self._states, self.pending = states, 0
        self._forget(ELSEWHERE)

    @property
    def marked(self) -> list[int]:
        """The columns of the marks, in order. Column 0 is always marked."""
        return [0, *(m.column for m in self._marks)]

    @property
    def makes_marks(self) -> bool:
        """Whether the cache makes marks by itself when it is read."""
        return self.marks is not None or bool(self._due)

    @property
    def state_bytes(self) -> int:
        """Bytes that a mark of the present states needs."""
        return state_bytes(self._states or [])

    @property
    def mark_bytes(self) -> int:
        """Bytes that the marks need in addition to the states."""
        return sum(m.bytes for m in self._marks)

    # --- going forward -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Makes the mark that is due at the present column. To be called before the states change."""
        if self._states is not None:
            self._require_room(self._states)
            if (self._due or self.marks is not None) and not self.pending:
                self.pause(self._states, 0)

    @contextmanager
    def marks_kept(self) -> Iterator[None]:
        """Forgets the marks of a call that fails."""
        marks, due = list(self._marks), set(self._due)
        try:
            yield
        except BaseException:
            self._marks, self._due = marks, due
            raise

    def ends(self, columns: int) -> list[int]:
        """Returns where the pieces end in which pending and further columns are read, so that marks can be made
        between them."""
        policy, total, start = self.marks or Marks(), self.pending + columns, self.columns - self.pending
        if not (self._due or self.marks or self.pending):  # a set would make a number of tokens in a graph a constant
            return [total]
        ends = {total, *(c - start for c in self._due if start < c < start + total)}
        if policy.every is not None:
            ends |= {c - start for c in range(start - start % policy.every, start + total, policy.every) if c > start}
        if policy.carry is not None and self.pending > policy.carry:
            ends.add(self.pending)
        return sorted(ends)

    def pause(self, states: list[Any], columns: int) -> None:
        """Makes the mark that is due after further columns, pending ones included. states: those there."""
        column, every = self.columns - self.pending + columns, (self.marks or Marks()).every
        kind = "own" if column in self._due else "every" if every is not None and column % every == 0 else "recent"
        self._due.discard(column)
        self._add_mark(column, states, kind)

    def resumed(
        self, x: Tensor, mask: Tensor | None, embed: Callable[[Tensor], Tensor]
    ) -> tuple[list[Any] | None, Tensor, Tensor | None]:
        """Returns (the states before pending tokens, x [B, T, D] with their embeddings before it, the mask of both)."""
        if not self.pending:
            return self._states, x, mask
        calls = self._record.between(self.columns - self.pending, self.columns)
        if mask is not None or any(call.mask is not None for call in calls):
            own = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
            mask = torch.cat([*(call.padding(len(x)) for call in calls), own], 1)
        return self._states, torch.cat([*(call.embedded(embed) for call in calls), x], 1), mask

    def unread(self, ids: Tensor) -> tuple[list[Any] | None, Tensor]:
        """Returns (the states before pending tokens, ids [B, T] with theirs before it); (None, ids) for pending tokens
        with padding, and for embeddings."""
        calls = self._record.between(self.columns - self.pending, self.columns) if self.pending else []
        if not all(map(has_ids_alone, calls)):
            return None, ids
        return self._states, torch.cat([*(call.ids for call in calls), ids], 1) if calls else ids

    def replace(
        self, states: list[Any], columns: int, tokens: Tensor | str = ELSEWHERE, mask: Tensor | None = None
    ) -> None:
        """Replaces the states by those after the pending columns and `columns` more. The cache takes ownership of the
        new states. tokens, mask: as in `advance`."""
        held = {id(state) for state in self._states or ()}
        self._states = [state if id(state) in held else _unshared(state) for state in states]
        self.advance(columns, tokens, mask)

    def advance(self, columns: int, tokens: Tensor | str, mask: Tensor | None = None) -> None:
        """Notes that the states cover the pending columns and `columns` more.

        Args:
            tokens: ids [B, columns], or [B] of one column, or embeddings [B, columns, D], of which the cache keeps a
                copy; or why it cannot go back behind these columns, as a sentence about "columns … to …".
            mask: [B, columns], bool; False marks padding.
        """
        start, self.columns, self.pending = self.columns, self.columns + columns, 0
        if isinstance(tokens, str):
            self._forget(tokens)
        elif not torch.compiler.is_compiling():
            kept = EMBEDDED if self.marks is None and tokens.is_floating_point() else tokens.clone()
            self._record.add(start, self.columns, kept, None if mask is None else mask.clone())

    def drop_marks(self) -> None:
        """Drops the marks, and crops no keys and values behind this column. For a call that gives those of earlier
        columns other places."""
        self._marks, self._floor = [], self.columns

    # --- going back --------------------------------------------------------------------------------------------------

    def mark(self, column: int | None = None) -> int:
        """Keeps the states of a column until the cache goes back behind it, and returns the column. A mark copies the
        states, but for the keys and values of softmax attention.

        Args:
            column: one that the states do not cover yet, which is marked when it is read; None: the present one.

        Raises:
            InputError: for a column that is covered, and for the present one while tokens are pending.
        """
        if column is None:
            self._refuse_pending("a mark needs their states")
            if self._states is not None:
                self._add_mark(self.columns, self._states, "own")
            return self.columns
        covered = self.columns - self.pending
        require(column > covered, f"mark({column}) of a cache that covers {covered} columns; expected a later column")
        self._due.add(column)
        return column

    def rewind(self, columns: int) -> None:
        """Forgets the last columns, and the marks in them.

        The states are then those of the nearest mark, and the tokens from there on are `pending`: the next call reads
        them too, and `model.settle` reads them at once. At a mark the states are bit-equal to those before. Of models
        with softmax attention alone, no token is pending.

        Raises:
            InputError: for fewer than 0 or more columns than there are, and where tokens after the mark are not kept:
                those of packs, embeddings without `marks`, states from elsewhere. The cache is then as before.
        """
        inside = not isinstance(columns, float) and 0 <= columns <= self.columns
        require(inside, f"rewind({columns}) of a cache of {self.columns} columns; expected 0 to {self.columns}")
        end = self.columns - int(columns)
        covered = self.columns - self.pending
        if end < covered:
            covered = self._go_back(end)
        self.columns, self.pending = end, end - covered
        self._marks = [m for m in self._marks if m.column <= end]
        self._record.cut(end)

    def _go_back(self, end: int) -> int:
        """Sets the states to earlier ones, and returns their column, at most `end`."""
        at = next((m for m in reversed(self._marks) if m.column <= end), None)
        start, states, covered = 0 if at is None else at.column, self._states or [], self.columns - self.pending
        if start < end and self._floor <= end and can_crop(states):
            self._states = crop(states, covered - end)
            return end
        self._record.between(start, end)
        self._states = None if at is None else at.restored(states, covered - start)
        return start

    @property
    def is_croppable(self) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """As in transformers: removes the last −tokens_to_remove columns. A positive number is the one of columns to
        keep at most, and so is 0 in earlier versions of transformers. Raises InputError as `rewind` does."""
        removes = tokens_to_remove < 0 or (tokens_to_remove == 0 and CROP_REMOVES)
        self.rewind(-tokens_to_remove if removes else max(self.columns - tokens_to_remove, 0))

    def _add_mark(self, column: int, states: list[Any], kind: str) -> None:
        policy = self.marks or Marks()
        if column == 0 or (kind == "recent" and not policy.recent):
            return
        if self._marks and self._marks[-1].column == column:
            self._marks[-1] = self._marks[-1].of(kind)
            return
        if kind != "own":
            self._require_room(states)
        self._marks = thinned([*self._marks, mark(column, states, kind)], policy, column)

    def _require_room(self, states: list[Any]) -> None:
        """Raises InputError if the marks that the cache makes by itself have no room for one of these states."""
        policy = self.marks or Marks()
        most = policy.bytes if policy.every or policy.recent else None
        if most is not None and (needed := state_bytes(states)) > most:
            raise InputError(f"Marks(bytes={most}) has no room for a mark; expected at least {needed}, those of one")

    def _forget(self, reason: str) -> None:
        """Drops all marks and tokens. reason: why the cache cannot go back, as a sentence about "columns … to …"."""
        self.drop_marks()
        self._record = Record()
        self._record.add(0, self.columns, reason)

    def _refuse_pending(self, why: str) -> None:
        if self.pending:
            raise InputError(
                f"{self.pending} tokens are pending after `rewind`, and {why}; call model.settle(cache) first"
            )

    # --- rows --------------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """What the cache keeps of each layer, as views (`cache_layers`); [] before the first token. Raises InputError
        while tokens are pending."""
        states = self.states or []
        own = iter(states[len(states) - sum(self.counts) :])  # without that of positions
        return [layer_of(list(islice(own, count)), self.columns) for count in self.counts] if states else []

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        require(not layers, "the layers of a HeadraceCache are those of its states; expected no others")

    def __len__(self) -> int:
        return len(self.counts if self._states else [])

    def __repr__(self) -> str:
        return f"HeadraceCache of {self.columns} columns"

    @property
    def batch_size(self) -> int:
        """Number of sequences; −1 before the first token."""
        if self._states is None and self.pending:
            return len(self._record.between(0, self.pending)[0].tokens)
        return next((len(state[0]) for state in self._states or [] if state is not None), -1)

    @property
    def is_initialized(self) -> bool:
        return self._states is not None or self.pending > 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """Whether `generate` passes all tokens again, which it does if all layers say so."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of input columns that the states cover; all layers have the same. Pending ones count."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    max_cache_len = -1  # its earlier name, which PEFT reads

    def activate_past_recording(self) -> None:
        """The cache always keeps what it needs to go back."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces the sequences by those with the indices beam_idx [B], as beam search does."""
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence, one copy after the other."""
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences with these indices."""
        self._change(lambda x: x[indices.to(x.device)])

    def append(self, other: "HeadraceCache") -> None:
        """Appends the sequences of another cache, which must not be used afterwards. The states have one size each:
        those of recurrent layers. The marks of both are dropped, and the cache cannot go back behind this column, as
        the sequences may have different lengths.

        Raises InputError while tokens are pending."""
        mine, theirs = self.states, other.states
        if mine is None or theirs is None:
            if mine is None:
                self._states, self.columns, self.counts = theirs, other.columns, other.counts
                self._record, self._marks, self._floor = other._record, other._marks, other._floor
            return
        self._states = [type(a)(*map(_concatenated, a, b)) for a, b in zip(mine, theirs, strict=True)]
        self._forget("were read before sequences of another cache were appended")

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        if self._states is not None:
            self._states = [copied(s, function) for s in self._states]
        self._marks = [m.changed(function) for m in self._marks]
        self._record.change(function)


def cache_argument(past_key_values: Any, cache: Any) -> HeadraceCache | DynamicCache | None:
    """Returns the cache that a model got under one of its two names. Raises InputError for one of another class."""
    require(past_key_values is None or cache is None, "past_key_values and cache are both given; expected one")
    argument = past_key_values if cache is None else cache
    accepted = argument is None or isinstance(argument, HeadraceCache | DynamicCache)
    require(accepted, f"past_key_values is a {type(argument).__name__}; expected a HeadraceCache")
    return argument


def _unshared(state: Any) -> Any:
    """Copies those tensors of a linear mixer's state that are views of larger tensors, because the state is updated in
    place and the rest of the larger tensor does not belong to the cache. (Keys and values of other states are written
    to memory of their own.)"""
    return MixerState._make(map(_own_storage, state)) if isinstance(state, MixerState) else state


def _own_storage(x: Tensor | None) -> Tensor | None:
    if x is None:
        return x
    # A graph that is compiled knows no sizes of memory.
    known = not torch.compiler.is_compiling() and x.is_contiguous()
    return x if known and x.untyped_storage().nbytes() == x.nbytes else x.clone(memory_format=torch.contiguous_format)


def _concatenated(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else torch.cat([a, b])
