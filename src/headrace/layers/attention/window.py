"""Softmax attention to a bounded number of tokens: a sliding window, the first tokens, random blocks (spec.Pattern).
Linear in T, and decoded from a cache that does not grow.

Queries are taken in groups that start at multiples of the block. What a group can see is listed by position, in columns

    first tokens | random blocks | window − 1 tokens before the group | the group itself

and gathered into a small dense attention. The cache is this same list for the group that begins with the next token,
without the group itself; so one map from position to place serves all of it, for any number of sequences, each at a
position of its own.

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
    """The keys, already rotated, and values that the next token may see; zero where there is none yet."""

    k: Tensor  # [N, S, Hkv, d]
    v: Tensor  # [N, S, Hkv, d]
    seen: Tensor  # [N], how many tokens came before


@lru_cache(maxsize=64)
def reservoir(pattern: Pattern, blocks: int) -> Tensor:
    """[blocks, random]: the blocks that queries of each block see beside window and first tokens; −1: none yet.

    Algorithm R (Vitter, 1985): the n-th block that begins to leave the window takes a slot with probability random / n.
    A draw depends on seed and n alone, so that all lengths agree; a block that is held keeps its slot until it is
    dropped, and is still within reach, in the cache or among the new tokens, when it is taken.
    """
    held, rows = [-1] * pattern.random, []
    begin, delay = -(-pattern.first // pattern.block), pattern.window // pattern.block
    for current in range(blocks):
        count = current - delay - begin  # how many left before this one
        if count >= 0:
            draw = random.Random(f"{pattern.seed} {count}").random()
            slot = count if count < pattern.random else int(draw * (count + 1))
            if slot < pattern.random:
                held[slot] = current - delay
        rows.append(list(held))
    return torch.tensor(rows)


class Places:
    """Where the tokens are: those of the cache, N · S in a row, and after them the T new ones.

    Args: cu_seqlens [N + 1] of the new tokens, tokens [N] seen before."""

    def __init__(self, pattern: Pattern, cu_seqlens: Tensor, tokens: Tensor):
        self.pattern, self.starts, self.tokens = pattern, cu_seqlens[:-1], tokens
        self.lengths = cu_seqlens.diff()

    def wanted(self, start: Tensor, size: int) -> Tensor:
        """[G, C]: the positions that `size` queries from position start [G] on may see; negative: there is none."""
        device, pattern = start.device, self.pattern
        first = torch.arange(pattern.first, device=device).expand(len(start), -1)
        near = start[:, None] + torch.arange(1 - pattern.window, size, device=device)
        if not pattern.random:
            return torch.cat([first, near], 1)
        block = start // pattern.block
        rows = 1 << int(block.max()).bit_length()  # a power of two: few tables
        chosen = reservoir(pattern, rows).to(device)[block]
        within = torch.arange(pattern.block, device=device)
        return torch.cat([first, (chosen[..., None] * pattern.block + within).flatten(1), near], 1)

    def find(self, position: Tensor, sequence: Tensor) -> Tensor:
        """Places of what `wanted` returned; of what does not exist, any place."""
        slots, seen = self.pattern.slots, self.tokens[sequence, None]
        end = seen + self.lengths[sequence, None]
        position = torch.minimum(position, end - 1)
        column = torch.arange(position.shape[1], device=position.device)
        recent = position > seen - self.pattern.window
        cached = torch.where(recent, position - seen + slots, column).clamp(0, slots - 1) + sequence[:, None] * slots
        new = len(self.tokens) * slots + self.starts[sequence, None] + position - seen
        return torch.where(position >= seen, new, cached)

    def keep(self, store: Tensor, end: Tensor) -> Tensor:
        """The cache [N, S, Hkv, d] when `end` [N] tokens have been seen, the last of which are these."""
        position = self.wanted(end, 0)
        places = self.find(position, torch.arange(len(end), device=end.device))
        missing = (position < 0) | (position >= end[:, None])
        return gather(store, places).masked_fill(missing[..., None, None], 0)

    def groups(self, size: int) -> tuple[Tensor, Tensor]:
        """Sequence [G] and first position [G] of every group of `size` queries."""
        begin, end = self.tokens // size, (self.tokens + self.lengths + size - 1) // size
        count = torch.where(self.lengths > 0, end - begin, 0)
        sequence = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        rank = torch.arange(len(sequence), device=count.device) - (count.cumsum(0) - count)[sequence]
        return sequence, (begin[sequence] + rank) * size

    def size(self) -> int:
        """Of the groups: no group may straddle two blocks if these see different random blocks."""
        longest = int(self.lengths.max())
        return 1 if longest <= 1 else self.pattern.block if self.pattern.random else min(self.pattern.window, longest)

    def gathering(self, size: int) -> tuple[Groups, Tensor]:
        """All groups of `size` queries, and which of their queries [G, size] are among the new tokens."""
        sequence, start = self.groups(size)
        own, position = start[:, None] + torch.arange(size, device=start.device), self.wanted(start, size)
        new = own - self.tokens[sequence, None]
        last = self.lengths[sequence, None] - 1
        rows = self.starts[sequence, None] + torch.minimum(new.clamp(min=0), last)
        return Groups(rows, self.find(position, sequence), own, position), (new >= 0) & (new <= last)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, state: WindowState | None, cu_seqlens: Tensor, softmax: "PatternSoftmax"
) -> tuple[Tensor, WindowState]:
    """q [T, H, d]; k, v [T, Hkv, d] of a pack -> (out [T, H, d], state)."""
    pattern = softmax.pattern
    if state is None:
        none = k.new_zeros(len(cu_seqlens) - 1, pattern.slots, *k.shape[1:])
        state = WindowState(none, none, torch.zeros_like(cu_seqlens[1:], dtype=torch.long))
    places = Places(pattern, cu_seqlens, state.seen)
    k, v = (torch.cat([old.flatten(0, 1), new]) for old, new in ((state.k, k), (state.v, v)))
    groups, mine = places.gathering(places.size())
    # What is held may be of a pass in another precision.
    out = attend_gathered(softmax, groups, q, k.to(q.dtype), v.to(q.dtype), softmax.parameters)
    end = state.seen + places.lengths
    return out[mine], WindowState(places.keep(k, end), places.keep(v, end), end)


@dataclass(frozen=True)
class PatternSoftmax:
    """The dense attention of each group: what the pattern shows, with the options of the softmax."""

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
        """[G, size, C]. What the window covers is seen in the columns of the window alone: nothing is seen twice."""
        near = torch.arange(position.shape[1], device=position.device) >= self.pattern.far
        return (position >= 0)[:, None] & (distance >= 0) & ((distance < self.pattern.window) == near)
