"""The cache of a headrace model between forward passes, with the interface of transformers' caches."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..layers.attention.attention import AttentionState
from ..layers.base import tensors
from ..ops.checks import require
from ..utils.errors import InputError, reading, require_each
from .cache_layers import layer_of
from .snapshots import Snapshots, copied

# What transformers calls the cache in arguments and outputs: "cache" from 5.24 on, "past_key_values" before.
NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
CROP_REMOVES = "tokens_to_remove" in inspect.signature(Cache.crop).parameters
# Why the cache cannot go back.
ELSEWHERE = "were read elsewhere, and their states set"
PACKED = "were read as packed sequences"


class HeadraceCache(Cache):
    """The states of all layers, and the number of input columns that were read, padding included.

    The cache also keeps the ids that it has read, so that it can go back: `rewind` forgets the last columns. A state
    of one size does not have earlier states, so the cache goes back to a snapshot (column 0 is always one), and the
    tokens from there on are *pending*: the model reads them with those of the next call. Keys and values of softmax
    attention are cropped.

    `layers` has an object for each layer of the model, with transformers' names, of what the cache keeps of it.
    transformers' DynamicCache is not used, because it drops the state of a recurrence without a convolution and rounds
    states to the precision of the first one written. The states belong to the cache and may be updated in place; to
    continue twice from the same state, copy the cache with copy.deepcopy.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forgets all states, as before the first token."""
        self.covered_states: list[Any] | None = None  # before the pending tokens; None before the first token
        self.columns = 0
        self.pending = 0  # number of last columns that the states do not cover
        self.snapshots = Snapshots()
        self.drafts: list[tuple[int, int]] = []  # (proposed, accepted) tokens of each call of assisted generation
        self._counts: list[int] = []  # number of states of each layer

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadraceCache":
        """Also of states with a gradient, which PyTorch does not copy: the copy's states have the same."""
        held = [self.covered_states or [], *(each.states for each in self.snapshots.taken)]
        states = [state for part in held for state in part if isinstance(state, tuple)]
        memo.update({id(x): x.clone() for x in tensors(states) if not x.is_leaf})
        other = HeadraceCache()
        other.__dict__.update(deepcopy(self.__dict__, memo))
        return other

    @property
    def states(self) -> list[Any] | None:
        """The states of all layers; None before the first token. Raises InputError while tokens are pending."""
        pending = f"{self.pending} tokens are pending after `rewind`, and the states do not cover them"
        require(not self.pending, f"{pending}; call model.read_pending(cache) first")
        return self.covered_states

    @states.setter
    def states(self, states: list[Any] | None) -> None:
        self.covered_states, self.pending = states, 0
        self.snapshots.forget(self.columns, ELSEWHERE)
        if states is not None:
            self.snapshots.take(self.columns, states, False)

    # --- going forward -----------------------------------------------------------------------------------------------

    def pending_ids(self) -> tuple[Tensor, Tensor | None]:
        """Returns the ids [B, P] of the pending tokens, P > 0, and their bool mask, or None if none was given."""
        return self.snapshots.ids(self.columns - self.pending, self.columns)

    def replace(
        self, states: list[Any], columns: int, ids: Tensor | str | None = ELSEWHERE, mask: Tensor | None = None,
        counts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Replaces the states by those after the pending columns and `columns` more. The cache takes ownership of the
        new states. ids, mask: as in `advance`. counts: number of states of each layer; (): as before."""
        self.covered_states, self._counts = states, list(counts) or self._counts
        self.advance(columns, ids, mask)

    def advance(self, columns: int, ids: Tensor | str | None, mask: Tensor | None = None) -> None:
        """Notes that the states cover the pending columns and `columns` more.

        Args:
            ids: [B, columns], of which the cache keeps a copy; None: of embeddings, which are not kept; or why the
                cache cannot go back behind this column, as a sentence about "columns … to …".
            mask: [B, columns], bool; False marks padding.
        """
        start, self.columns, self.pending = self.columns, self.columns + columns, 0
        if isinstance(ids, str):
            self.snapshots.forget(self.columns, ids)
        else:
            self.snapshots.add(start, self.columns, ids, mask)

    def forget_places(self) -> None:
        """Drops the snapshots, and allows no crop of keys and values to a column before this one. For a call that has
        moved the keys and values of earlier columns."""
        self.snapshots.taken, self.snapshots.croppable_from = [], self.columns

    @contextmanager
    def overwritten(self) -> Iterator[None]:
        """While a call may overwrite the states. If it fails, they go back to the last snapshot, and the tokens from
        there on are pending."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, InputError):  # which is raised before anything is written
                last, covered = self.snapshots.taken[-1:], self.columns - self.pending
                states = [each.restored(self.covered_states or [], covered - each.column) for each in last]
                self.covered_states = states[0] if states else None
                self.pending = self.columns - sum(each.column for each in last)
            raise

    # --- going back --------------------------------------------------------------------------------------------------

    def snapshot(self, *, temporary: bool = False) -> int:
        """Keeps the states of the present column until the cache goes back behind it, and returns the column. A
        snapshot copies the states, but for the keys and values of softmax attention.

        Args:
            temporary: whether to drop it when the next temporary snapshot is taken.

        Raises:
            InputError: while tokens are pending.
        """
        if (states := self.states) is not None:
            self.snapshots.take(self.columns, states, temporary)
        return self.columns

    def rewind(self, columns: int) -> None:
        """Forgets the last columns, and the snapshots in them.

        The states are then those of the nearest snapshot, and the tokens from there on are `pending`: the next call
        reads them too, and `model.read_pending` reads them at once. At a snapshot the states are bit-equal to those
        before. Of models with softmax attention alone, no token is pending.

        Raises:
            InputError: for fewer than 0 or more columns than there are, and where the ids after the snapshot are not
                kept: those of packs, embeddings, states from elsewhere. The cache is then as before.
        """
        inside = _is_integer(columns) and 0 <= columns <= self.columns
        require(inside, f"rewind({columns}) of a cache of {self.columns} columns; expected 0 to {self.columns}")
        end, covered = self.columns - int(columns), self.columns - self.pending
        if end < covered:
            covered, self.covered_states = self.snapshots.back(end, covered, self.covered_states or [])
        self.snapshots.cut(end)
        self.columns, self.pending = end, end - covered

    def crop(self, tokens_to_remove: int) -> None:
        """As in transformers: removes the last −tokens_to_remove columns. A positive number, and in earlier versions of
        transformers also 0, is the largest number of columns to keep. Raises InputError as `rewind` does."""
        require_each(_is_integer, "an integer", tokens_to_remove=tokens_to_remove)
        removes = tokens_to_remove < 0 or (tokens_to_remove == 0 and CROP_REMOVES)
        self.rewind(-tokens_to_remove if removes else max(self.columns - tokens_to_remove, 0))

    # --- rows --------------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """What the cache keeps of each layer, as views (`cache_layers`); [] before the first token and while tokens are
        pending."""
        states = [] if self.pending else self.covered_states or []
        of_layers = iter(states[len(states) - sum(self._counts) :])  # without the state of positions
        return [layer_of(list(islice(of_layers, count)), self.columns) for count in self._counts] if states else []

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        require(not layers, "the layers of a HeadraceCache are those of its states; expected no others")

    def __len__(self) -> int:
        return len(self._counts if self.covered_states else [])

    def __repr__(self) -> str:
        return f"HeadraceCache of {self.columns} columns"

    @property
    def batch_size(self) -> int:
        """Number of sequences; −1 before the first token."""
        states = (state[0] for state in self.covered_states or [] if state is not None)
        ids = (piece.ids for piece in self.snapshots.pieces if isinstance(piece.ids, Tensor))
        return next(map(len, chain(states, ids)), -1)

    def check_sequences(self, sequences: int) -> None:
        """Raises InputError for another number of sequences."""
        if self.batch_size not in (-1, sequences):
            raise InputError(f"past_key_values holds {self.batch_size} sequences; expected {sequences} as in the input")

    @property
    def is_initialized(self) -> bool:
        return self.covered_states is not None or self.pending > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of input columns that were read, pending ones included. All layers have the same."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    max_cache_len = -1  # the earlier name of get_max_length, which PEFT reads
    is_linear: Any = (False,)  # `generate` passes all tokens again if all layers say so
    is_croppable = True
    is_compileable = False

    def activate_past_recording(self) -> None:
        """The cache always keeps what it needs to go back."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces the sequences by those with the indices beam_idx [B], as beam search does."""
        self._select("beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence, one copy after the other."""
        require_each(lambda n: _is_integer(n) and n > 0, "a positive integer", repeats=repeats)
        self._change(lambda x: x.repeat_interleave(int(repeats), 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences with these indices, or those that a mask of bools marks."""
        self._select("indices", indices)

    def append(self, other: "HeadraceCache") -> None:
        """Appends the sequences of another cache, which must not be used afterwards. Each state must have one size, as
        those of recurrent layers have. The snapshots of both are dropped, and the cache cannot go back behind this
        column, as the sequences may have different lengths.

        Raises InputError while tokens are pending, and for states of other kinds or without one size."""
        require_each(lambda x: isinstance(x, HeadraceCache), "a HeadraceCache", other=other)
        mine, theirs = self.states, other.states
        if mine is None:
            self.__dict__.update(other.__dict__)
        elif theirs is not None:
            kinds, others = ([*map(type, each), *(x.shape[1:] for x in tensors(each))] for each in (mine, theirs))
            same = kinds == others and AttentionState not in kinds and {*kinds} != {type(None)}  # which have no rows
            require(same, "append joins states of the same kinds and of one size; expected such states of both caches")
            added = iter(tensors(theirs))
            self.covered_states = [copied(state, lambda x: torch.cat([x, next(added)])) for state in mine]
            self.snapshots.forget(self.columns, "were read before sequences of another cache were appended")

    def _select(self, name: str, indices: Any) -> None:
        with reading(f"{name} is no index of the sequences of a cache"):
            rows = torch.as_tensor(indices).reshape(-1)
            rows = rows if self.batch_size >= 0 else rows[:0]  # nothing is selected of an empty cache
            rows = torch.arange(max(self.batch_size, 0), device=rows.device)[rows]
        on_device = cache(rows.to)  # copied once
        self._change(lambda x: x.index_select(0, on_device(x.device)))

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.covered_states is not None:
            self.covered_states = [copied(state, function) for state in self.covered_states]
        self.snapshots.change(function)


def _is_integer(x: Any) -> bool:
    """Whether x is an integer of Python or of another library."""
    return hasattr(x, "__index__") and not getattr(x, "shape", ())


def cache_argument(past_key_values: Any, cache: Any) -> HeadraceCache | DynamicCache | None:
    """Returns the cache that a model got under one of its two names. Raises InputError for one of another class."""
    require(past_key_values is None or cache is None, "past_key_values and cache are both given; expected one")
    argument = past_key_values if cache is None else cache
    accepted = argument is None or isinstance(argument, HeadraceCache | DynamicCache)
    require(accepted, f"past_key_values is a {type(argument).__name__}; expected a HeadraceCache")
    return argument
