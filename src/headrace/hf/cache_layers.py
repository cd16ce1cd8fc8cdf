"""What a cache keeps of each layer under the names of transformers, and transformers' DynamicCache as a cache of ours.

Dimensions: B batch, H heads (Hkv of keys and values), L columns, d head dimension, W width of a convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from ..layers.attention.attention import AttentionState, WindowState
from ..layers.base import ShiftState
from ..layers.blocks.stack import PositionState
from ..ops.checks import require


@CacheLayerMixin.register
@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Keys and values of softmax attention: views of a HeadraceCache, which changes by a model's calls alone."""

    keys: Tensor  # [B, Hkv, L, d]; of a window, with zeros where no token is kept
    values: Tensor
    columns: int  # number of columns that were read
    is_sliding: bool  # whether of a window

    is_initialized = True

    def get_seq_length(self) -> int:
        """Returns the number of columns that were read."""
        return self.columns


@LinearAttentionCacheLayerMixin.register
@dataclass(frozen=True, eq=False)
class RecurrentLayer:
    """States of the recurrent mixers of a layer, by their number: views of a HeadraceCache, which changes by a model's
    calls alone. The first dimension is B."""

    recurrent_states: dict[int, Any]  # the memory; None without one
    conv_states: dict[int, Tensor | None]  # [B, channels, W − 1], the last inputs of the short convolution

    @property
    def number_of_states(self) -> int:
        return len(self.recurrent_states)

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return dict.fromkeys(self.recurrent_states, True)


@dataclass(frozen=True, eq=False)
class HybridLayer(RecurrentLayer, AttentionLayer):
    """A layer with both: a parallel mixer, or the shared attention before it."""


def layer_of(states: Sequence[Any], columns: int) -> AttentionLayer | RecurrentLayer:
    """Returns the object of a layer with these states."""
    attention = next((s for s in states if isinstance(s, AttentionState | WindowState)), None)
    others = dict(enumerate(s for s in states if s is not attention and not isinstance(s, ShiftState)))
    kept: dict[str, Any] = {}
    if attention is not None:
        kept |= {"keys": attention.k.transpose(1, 2), "values": attention.v.transpose(1, 2), "columns": columns}
        kept["is_sliding"] = isinstance(attention, WindowState)
    if not others:
        return AttentionLayer(**kept)
    convs = {i: getattr(s, "conv", None) for i, s in others.items()}
    kept["conv_states"] = {i: None if conv is None else conv.transpose(1, 2) for i, conv in convs.items()}
    kept["recurrent_states"] = {i: None if s is None else getattr(s, "memory", s[0]) for i, s in others.items()}
    return RecurrentLayer(**kept) if attention is None else HybridLayer(**kept)


def read_dynamic(cache: DynamicCache, model: Any, mask: Tensor | None, T: int) -> tuple[int, list[Any] | None]:
    """Returns the number of columns of a DynamicCache and its states.

    mask: [B, columns + T], by which padding among the columns is known, or [B, T], of the tokens after them.

    Raises InputError for a model with a layer that keeps anything but all keys and values."""
    kinds, L = model.config.layer_types, cache.get_seq_length()
    plain = all(count == 1 for count in model.backbone.state_counts)
    other = next((f"layer {i} is of {kind}" for i, kind in enumerate(kinds) if kind != "full_attention"), None)
    other = other or (None if plain else "a layer's MLP has a state")
    require(other is None, f"past_key_values is a DynamicCache, and {other}; expected a HeadraceCache")
    packs = "past_key_values is a DynamicCache, and a mixer keeps no keys of padding; expected a HeadraceCache"
    require(mask is None or not model.packs_keys or bool(mask.all()), packs)
    if not L:
        return 0, None
    layers: list[Any] = cache.layers
    require(len(layers) == len(kinds), f"past_key_values has {len(layers)} layers; expected {len(kinds)}")
    mask = None if mask is None or mask.shape[1] == T else mask[:, :L].to(layers[0].keys.device).bool()
    mask = None if mask is None or mask.all() else mask
    states = [AttentionState(each.keys.transpose(1, 2), each.values.transpose(1, 2), mask) for each in layers]
    return L, [PositionState(states[0].seen)] * (model.backbone.positions is not None) + states


def write_dynamic(cache: DynamicCache, states: Sequence[Any]) -> None:
    """Appends to a DynamicCache the columns that these states have and it has not."""
    L = cache.get_seq_length()
    for i, state in enumerate(s for s in states if isinstance(s, AttentionState)):
        cache.update(state.k[:, L:].transpose(1, 2), state.v[:, L:].transpose(1, 2), i)
