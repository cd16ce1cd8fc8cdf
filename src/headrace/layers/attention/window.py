"""Sparse softmax attention to a sliding window, the first tokens and random blocks (spec.Pattern), in time linear in T
and with a cache of fixed size.

Queries are processed in groups that start at multiples of the block size. The keys of a group are listed by position,
in the columns

    first tokens | random blocks | window − 1 tokens before the group | the group itself

and gathered into a small dense attention. The cache is the same list for the group that begins with the next token,
without the group itself, so that one function maps positions to places of the cache and of the new tokens.

Dimensions: N sequences, T tokens of all of them together, G groups of `size` queries, S cache slots, C = S + size
columns, H query heads, Hkv key/value heads, d head dimension.
"""

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...spec.attention import Pattern
from .gathered import Groups, attend_gathered, gather
from .positions import DistanceBias
from .sdpa import weigh


class WindowState(NamedTuple):
    """The keys, after rotation, and values that later tokens attend to; zeros in free slots."""

    k: Tensor  # [N, S, Hkv, d]
    v: Tensor  # [N, S, Hkv, d]
    seen: Tensor  # [N], number of tokens so far


@lru_cache(maxsize=64)
def reservoir(pattern: Pattern, blocks: int) -> Tensor:
    """Returns the random blocks [blocks, random] that the queries of each block attend to; −1: none yet.

    Algorithm R (Vitter, 1985): the n-th block that begins to leave the window takes a slot with probability random / n.
    The draw depends only on seed and n, so that it is the same for all lengths. A block keeps its slot until another
    one replaces it, and is in the cache or among the new tokens when it takes the slot.
    """
    held, rows = [-1] * pattern.random, []
    begin, delay = -(-pattern.first // pattern.block), pattern.window // pattern.block
    for current in range(blocks):
        count = current - delay - begin  # number of blocks that left the window before this one
        if count >= 0:
            draw = random.Random(f"{pattern.seed} {count}").random()
            slot = count if count < pattern.random else int(draw * (count + 1))
            if slot < pattern.random:
                held[slot] = current - delay
        rows.append(list(held))
    return torch.tensor(rows)


class Places:
    """Places of the tokens in a store: the N · S tokens of the cache, then the T new tokens.

    Args:
        cu_seqlens: [N + 1], bounds of the new tokens' sequences.
        tokens: [N], number of tokens before the new ones.
    """

    def __init__(self, pattern: Pattern, cu_seqlens: Tensor, tokens: Tensor):
        self.pattern, self.starts, self.tokens = pattern, cu_seqlens[:-1], tokens
        self.lengths = cu_seqlens.diff()

    def key_positions(self, start: Tensor, size: int) -> Tensor:
        """Returns the positions [G, C] that `size` queries from position start [G] on may attend to; negative: none."""
        device, pattern = start.device, self.pattern
        first = torch.arange(pattern.first, device=device).expand(len(start), -1)
        near = start[:, None] + torch.arange(1 - pattern.window, size, device=device)
        if not pattern.random:
            return torch.cat([first, near], 1)
        block = start // pattern.block
        last = int(block.max()) if len(block) else 0
        rows = 1 << last.bit_length()  # a power of two, so that few tables are cached
        chosen = reservoir(pattern, rows).to(device)[block]
        within = torch.arange(pattern.block, device=device)
        return torch.cat([first, (chosen[..., None] * pattern.block + within).flatten(1), near], 1)

    def find(self, position: Tensor, sequence: Tensor) -> Tensor:
        """Returns the places of positions from `key_positions`; an arbitrary place for those that do not exist."""
        slots, seen = self.pattern.slots, self.tokens[sequence, None]
        end = seen + self.lengths[sequence, None]
        position = torch.minimum(position, end - 1)
        column = torch.arange(position.shape[1], device=position.device)
        recent = position > seen - self.pattern.window
        cached = torch.where(recent, position - seen + slots, column).clamp(0, slots - 1) + sequence[:, None] * slots
        new = len(self.tokens) * slots + self.starts[sequence, None] + position - seen
        return torch.where(position >= seen, new, cached)

    def next_cache(self, store: Tensor, end: Tensor) -> Tensor:
        """Returns the cache [N, S, Hkv, d] after `end` [N] tokens, the last of which are the new ones."""
        position = self.key_positions(end, 0)
        places = self.find(position, torch.arange(len(end), device=end.device))
        missing = (position < 0) | (position >= end[:, None])
        return gather(store, places).masked_fill(missing[..., None, None], 0)

    def groups(self, size: int) -> tuple[Tensor, Tensor]:
        """Returns the sequence [G] and the first position [G] of each group of `size` queries."""
        begin, end = self.tokens // size, (self.tokens + self.lengths + size - 1) // size
        count = torch.where(self.lengths > 0, end - begin, 0)
        sequence = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        rank = torch.arange(len(sequence), device=count.device) - (count.cumsum(0) - count)[sequence]
        return sequence, (begin[sequence] + rank) * size

    def size(self) -> int:
        """Returns the group size. A group must lie in one block if there are random blocks, which differ by block."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        return 1 if longest <= 1 else self.pattern.block if self.pattern.random else min(self.pattern.window, longest)

    def all_groups(self, size: int) -> tuple[Groups, Tensor]:
        """Returns all groups of `size` queries, and a mask [G, size] of the queries that are new tokens."""
        sequence, start = self.groups(size)
        own, position = start[:, None] + torch.arange(size, device=start.device), self.key_positions(start, size)
        new = own - self.tokens[sequence, None]
        last = self.lengths[sequence, None] - 1
        rows = self.starts[sequence, None] + torch.minimum(new.clamp(min=0), last)
        return Groups(rows, self.find(position, sequence), own, position), (new >= 0) & (new <= last)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, state: WindowState | None, cu_seqlens: Tensor, softmax: "PatternSoftmax"
) -> tuple[Tensor, WindowState]:
    """Computes attention with the pattern for packed sequences.

    q [T, H, d]; k, v [T, Hkv, d] -> (out [T, H, d], the next state)."""
    pattern = softmax.pattern
    if state is None:
        none = k.new_zeros(len(cu_seqlens) - 1, pattern.slots, *k.shape[1:])
        state = WindowState(none, none, torch.zeros_like(cu_seqlens[1:], dtype=torch.long))
    places = Places(pattern, cu_seqlens, state.seen)
    k, v = (torch.cat([old.flatten(0, 1), new]) for old, new in ((state.k, k), (state.v, v)))
    groups, mine = places.all_groups(places.size())
    # The cache may come from a call in another precision.
    out = attend_gathered(softmax, groups, q, k.to(q.dtype), v.to(q.dtype), softmax.parameters)
    end = state.seen + places.lengths
    return out[mine], WindowState(places.next_cache(k, end), places.next_cache(v, end), end)


@dataclass(frozen=True)
class PatternSoftmax:
    """The dense attention of the groups, with the pattern's mask and the options of the softmax."""

    pattern: Pattern
    bias: DistanceBias | None
    null: bool

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [] if self.bias is None else [self.bias.weight]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups) -> Tensor:
        distance = groups.own[:, :, None] - groups.position[:, None]
        bias = None if self.bias is None else self.bias(distance)
        return weigh(q, k, v, self.allowed(distance, groups.position)[:, None], bias, null=self.null)

    def allowed(self, distance: Tensor, position: Tensor) -> Tensor:
        """Returns the mask [G, size, C]. A token in the window is only attended to in the window's columns, because it
        may also be a first token or in a random block."""
        near = torch.arange(position.shape[1], device=position.device) >= self.pattern.far
        return (position >= 0)[:, None] & (distance >= 0) & ((distance < self.pattern.window) == near)
