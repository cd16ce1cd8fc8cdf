"""Decoding one token at a time after a long context.

Where the cost of a step does not depend on the content of the state, the context is not processed: a state of one size
has it after 64 tokens, and then only counts more of them, and a key-value cache is filled with random numbers. Models
with another kind of state process the whole context.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..hf.cache import NAME as CACHE
from ..hf.cache import HeadraceCache
from ..layers.attention.attention import AttentionState

READ = 64  # tokens of context that every model processes
PIECE = 4096  # tokens per forward pass over a long context
COUNTS = "tokens", "seen"  # fields with the number of tokens so far, of states of one size
RECURRENT, CACHED, READ_ALL = f"{READ} tokens read", "cache filled at random", "read in full"


class PositionlessCache(transformers.DynamicCache):
    """A DynamicCache for models without attention layers, for which the length methods of DynamicCache raise. Such
    models do not use the length."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class Decoder:
    """A model with its cache. After `reach`, `how` is RECURRENT, CACHED or READ_ALL: how the position was reached.

    Args:
        batch: number of sequences that `read` and `token` continue.
    """

    def __init__(self, model: Any, batch: int = 1):
        self.model, self.batch, self.how = model.eval(), batch, READ_ALL
        kind = type(self.model.config).__name__
        self.argument = "cache_params" if kind == "Mamba2Config" and CACHE != "cache" else CACHE
        self.cache: Any = PositionlessCache(config=self.model.config) if kind == "Qwen3NextConfig" else None

    def reach(self, position: int) -> None:
        self.read(min(READ, position))
        if isinstance(self.cache, HeadraceCache):
            self.skip_to(position)
            return
        self.how = RECURRENT
        for layer in self.cache.layers:
            if getattr(layer, "keys", None) is not None:
                self.how = CACHED
                layer.keys, layer.values = (random_like(x, position, 2) for x in (layer.keys, layer.values))

    def skip_to(self, position: int) -> None:
        states = self.cache.states
        if any(not isinstance(state, AttentionState) and not counts(state) for state in states):
            for begin in range(READ, position, PIECE):
                self.read(min(PIECE, position - begin))
            return
        self.how = CACHED if any(isinstance(state, AttentionState) for state in states) else RECURRENT
        self.cache = HeadraceCache()
        self.cache.replace([at_position(state, position) for state in states], position)

    def read(self, tokens: int) -> None:
        device = next(self.model.parameters()).device
        self.forward(torch.randint(self.model.config.vocab_size, (self.batch, tokens), device=device))

    def forward(self, ids: Tensor) -> None:
        past = {} if self.cache is None else {self.argument: self.cache}
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **past)
        self.cache, self.next = getattr(out, self.argument), out.logits[:, -1:].argmax(-1)

    def token(self) -> None:
        self.forward(self.next)

    def state_bytes(self) -> int:
        """Bytes of the floating-point tensors of the cache; token counts are left out."""
        layers = self.cache.states if isinstance(self.cache, HeadraceCache) else [vars(x) for x in self.cache.layers]
        return sum(x.nbytes for x in tree_leaves(layers) if isinstance(x, Tensor) and x.is_floating_point())


def at_position(state: Any, position: int) -> Any:
    if isinstance(state, AttentionState):
        return AttentionState(random_like(state.k, position, 1), random_like(state.v, position, 1))
    known = {name: getattr(state, name) for name in counts(state)}
    return state._replace(**{name: torch.full_like(x, position) for name, x in known.items() if x is not None})


def counts(state: Any) -> set[str]:
    return {*COUNTS} & {*state._fields}


def random_like(x: Tensor, tokens: int, dim: int) -> Tensor:
    """A random tensor like x with `tokens` tokens along `dim`, made by repeating one random piece of x's size."""
    piece = torch.randn_like(x)
    repeats = [1] * x.dim()
    repeats[dim] = -(-tokens // x.shape[dim])
    return piece.repeat(repeats).narrow(dim, 0, tokens).contiguous()
