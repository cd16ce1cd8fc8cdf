"""The cache of a headrace model between forward passes, with the interface of transformers' caches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..layers.linear.token import MixerState
from ..ops.checks import require
from ..utils.errors import InputError

# What transformers calls the cache in arguments and outputs: "cache" from 5.24 on, "past_key_values" before.
NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class HeadraceCache(Cache):
    """The states of all layers, and the number of input columns that the states cover, padding included.

    transformers' DynamicCache is not used, because it drops the state of a recurrence without a convolution and rounds
    states to the precision of the first one written. The states belong to the cache and may be updated in place; to
    continue twice from the same state, copy the cache with copy.deepcopy.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forgets all states, as before the first token."""
        self.states: list[Any] | None = None  # the state of a layer is None before its first token
        self.columns = 0

    def replace(self, states: list[Any], columns: int) -> None:
        """Replaces the states by those after `columns` more columns. The cache takes ownership of the new states."""
        held = {id(state) for state in self.states or ()}
        self.states = [state if id(state) in held else _unshared(state) for state in states]
        self.columns += columns

    def __len__(self) -> int:
        return len(self.states or [])

    @property
    def batch_size(self) -> int:
        """Number of sequences; −1 before the first token."""
        return next((len(state[0]) for state in self.states or [] if state is not None), -1)

    @property
    def is_initialized(self) -> bool:
        return self.states is not None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """Whether `generate` passes all tokens again, which it does if all layers say so."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of input columns that the states cover; all layers have the same."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

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
        those of recurrent layers."""
        if self.states is None or other.states is None:
            self.states, self.columns = self.states or other.states, max(self.columns, other.columns)
            return
        pairs = zip(self.states, other.states, strict=True)
        self.states = [type(a)(*map(_joined, a, b)) for a, b in pairs]

    def crop(self, tokens_to_remove: int) -> None:
        """Raises InputError: a recurrent state does not keep earlier states."""
        raise InputError(
            f"crop(tokens_to_remove={tokens_to_remove}) is not possible, as a recurrent state does not keep earlier "
            "states; run the shorter sequence from its start"
        )

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.states is not None:
            self.states = [_changed(s, function) for s in self.states]


def cache_argument(past_key_values: Any, cache: Any) -> HeadraceCache | None:
    """Returns the cache that a model got under one of its two names. Raises InputError for one of another class."""
    require(past_key_values is None or cache is None, "past_key_values and cache are both given; expected one")
    argument = past_key_values if cache is None else cache
    accepted = argument is None or isinstance(argument, HeadraceCache)
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


def _joined(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else torch.cat([a, b])


def _changed(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return None if state is None else type(state)(*(function(x) if isinstance(x, Tensor) else None for x in state))
