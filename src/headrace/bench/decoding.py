"""A model that stands at a position of a long context and goes on from there, token by token.

A position need not be read to be reached where what the model carries is known: a recurrence costs the same after any
64 tokens, and a cache of keys and values may hold any numbers. What has another state reads the whole context.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..cache import HeadraceCache
from ..mixers.attention import AttentionState
from ..mixers.decode import MixerState

READ = 64  # tokens that are always read
PIECE = 4096
RECURRENT, CACHED, READ_ALL = f"{READ} tokens read", "cache filled at random", "read in full"


class PositionlessCache(transformers.DynamicCache):
    """transformers' own raises when it is asked for its length and no layer attends; then none needs that either."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class Decoder:
    """model after `position` tokens; `how` it got there is RECURRENT, CACHED or READ_ALL."""

    def __init__(self, model: nn.Module, position: int):
        self.model, self.position, self.how = model.eval(), position, READ_ALL
        kind = type(model.config).__name__
        self.argument = "cache_params" if kind == "Mamba2Config" else "past_key_values"
        self.cache: Any = PositionlessCache(config=model.config) if kind == "Qwen3NextConfig" else None
        self.read(min(READ, position))
        if isinstance(self.cache, HeadraceCache):
            self.move()
        elif any(getattr(layer, "keys", None) is not None for layer in self.cache.layers):
            self.how = CACHED
            for layer in self.cache.layers:
                layer.keys, layer.values = (longer(x, position, 2) for x in (layer.keys, layer.values))
        else:
            self.how = RECURRENT

    def move(self) -> None:
        states = self.cache.states
        if any(not isinstance(state, MixerState | AttentionState) for state in states):
            for begin in range(min(READ, self.position), self.position, PIECE):
                self.read(min(PIECE, self.position - begin))
            return
        self.how = CACHED if any(isinstance(state, AttentionState) for state in states) else RECURRENT
        self.cache = HeadraceCache()
        self.cache.replace([moved(state, self.position) for state in states], self.position)

    def read(self, tokens: int) -> None:
        vocabulary = self.model.config.vocab_size
        self.forward(torch.randint(vocabulary, (1, tokens), device=next(self.model.parameters()).device))

    def forward(self, ids: Tensor) -> None:
        past = {} if self.cache is None else {self.argument: self.cache}
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **past)
        self.cache, self.next = getattr(out, self.argument), out.logits[:, -1:].argmax(-1)

    def token(self) -> None:
        self.forward(self.next)

    def state_bytes(self) -> int:
        layers = self.cache.states if isinstance(self.cache, HeadraceCache) else map(vars, self.cache.layers)
        return sum(x.nbytes for layer in layers for x in tensors(layer) if x.is_floating_point())


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
