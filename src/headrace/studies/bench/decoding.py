"""A model that stands at a position of a long context and goes on from there, token by token.

A position need not be read to be reached where what the model carries is known: a recurrence costs the same after any
64 tokens, and a cache of keys and values may hold any numbers. What has another state reads the whole context.
"""

from typing import Any

import torch
import transformers
from torch import Tensor

from ...hf.cache import HeadraceCache
from ...layers.attention.attention import AttentionState
from ...layers.decode import MixerState

READ = 64  # tokens that are read in any case
PIECE = 4096
RECURRENT, CACHED, READ_ALL = f"{READ} tokens read", "cache filled at random", "read in full"


class PositionlessCache(transformers.DynamicCache):
    """transformers' own raises when it is asked for its length and no layer attends; then none needs that either."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class Decoder:
    """A model and what it has read. After `reach`, `how` it got there is RECURRENT, CACHED or READ_ALL."""

    def __init__(self, model: Any):
        self.model, self.how = model.eval(), READ_ALL
        kind = type(self.model.config).__name__
        self.argument = "cache_params" if kind == "Mamba2Config" else "past_key_values"
        self.cache: Any = PositionlessCache(config=self.model.config) if kind == "Qwen3NextConfig" else None

    def reach(self, position: int) -> None:
        self.read(min(READ, position))
        if isinstance(self.cache, HeadraceCache):
            self.move(position)
            return
        self.how = RECURRENT
        for layer in self.cache.layers:
            if getattr(layer, "keys", None) is not None:
                self.how = CACHED
                layer.keys, layer.values = (longer(x, position, 2) for x in (layer.keys, layer.values))

    def move(self, position: int) -> None:
        states = self.cache.states
        if any(not isinstance(state, MixerState | AttentionState) for state in states):
            for begin in range(READ, position, PIECE):
                self.read(min(PIECE, position - begin))
            return
        self.how = CACHED if any(isinstance(state, AttentionState) for state in states) else RECURRENT
        self.cache = HeadraceCache()
        self.cache.replace([moved(state, position) for state in states], position)

    def read(self, tokens: int) -> None:
        device = next(self.model.parameters()).device
        self.forward(torch.randint(self.model.config.vocab_size, (1, tokens), device=device))

    def forward(self, ids: Tensor) -> None:
        past = {} if self.cache is None else {self.argument: self.cache}
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **past)
        self.cache, self.next = getattr(out, self.argument), out.logits[:, -1:].argmax(-1)

    def token(self) -> None:
        self.forward(self.next)

    def state_bytes(self) -> int:
        """Of the numbers in it; the count of tokens that rotary positions need is not one of them."""
        layers = self.cache.states if isinstance(self.cache, HeadraceCache) else [vars(x) for x in self.cache.layers]
        return sum(x.nbytes for x in tensors(layers) if x.is_floating_point())


def moved(state: Any, position: int) -> Any:
    if isinstance(state, AttentionState):
        return AttentionState(longer(state.k, position, 1), longer(state.v, position, 1))
    return state if state.tokens is None else state._replace(tokens=torch.full_like(state.tokens, position))


def longer(x: Tensor, tokens: int, dim: int) -> Tensor:
    """Random numbers as x, of so many tokens along `dim`; from token to token a piece repeats itself."""
    piece = torch.randn_like(x)
    repeats = [1] * x.dim()
    repeats[dim] = -(-tokens // x.shape[dim])
    return piece.repeat(repeats).narrow(dim, 0, tokens).contiguous()


def tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [found for part in parts for found in tensors(part)]
