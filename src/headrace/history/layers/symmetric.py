"""Sparse softmax attention of an encoder (spec.Pattern): Longformer (arXiv 2004.05150, section 3) and BigBird (arXiv
2007.14062, section 2), in time linear in T.

Every token attends to a window on both sides, to the global tokens, and to random blocks. The keys of a group of
queries are in the columns

    first tokens | last tokens | random blocks | `reach` tokens before the group | the group itself | `reach` after it

and gathered into a small dense attention. Global tokens attend to all tokens, in one more dense attention.

Dimensions: N sequences, T tokens of all of them together, G groups of `size` queries, C columns, R global tokens of all
sequences, g global tokens of one, H query heads, Hkv key/value heads, d head dimension.
"""

import random
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ...extra.gathered import Places, attend_gathered
from ...extra.pattern import PatternSoftmax
from ...layers.attention.sdpa import weigh
from ...spec.attention import Pattern
from ...utils.device import kept_on_cpu

BITS = 31  # of a draw: its product with a number of blocks fits 64 bits


def unit_of(pattern: Pattern) -> int:
    """Returns the number of tokens that enter an encoder's window together."""
    return pattern.block if pattern.random else 1


def reach_of(pattern: Pattern) -> int:
    """Returns the number of tokens on either side of a unit in an encoder's window."""
    return pattern.window // 2 // unit_of(pattern) * unit_of(pattern)


@kept_on_cpu
def draws(pattern: Pattern, blocks: int) -> Tensor:
    """Returns uniform integers [blocks, random] below 2^BITS; those of the first blocks are the same for any number."""
    generator = random.Random(pattern.seed)
    drawn = [[generator.getrandbits(BITS) for _ in range(pattern.random)] for _ in range(blocks)]
    return torch.tensor(drawn, dtype=torch.long)


def random_blocks(pattern: Pattern, block: Tensor, length: Tensor) -> Tensor:
    """Returns the random blocks [G, random] that the queries of each block [G] attend to, in sequences of length [G];
    −1: no block is left.

    They are drawn without replacement (Floyd's algorithm; Bentley and Floyd, 1987) from the blocks outside the window
    that are not all global. The draw depends only on the seed, the block and the number of blocks to draw from."""
    around, begin = reach_of(pattern) // pattern.block, pattern.first // pattern.block
    end = (length - pattern.last + pattern.block - 1) // pattern.block
    window = (block - around).clamp(min=begin)  # first block of the window that could be drawn otherwise
    inside = (torch.minimum(block + around + 1, end) - window).clamp(min=0)
    count = (end - begin - inside).clamp(min=0)
    rows = 1 << (int(block.max()) if len(block) else 0).bit_length()  # a power of two, so that few tables are cached
    drawn, chosen = draws(pattern, rows).to(block.device)[block], torch.full_like(block, -1)[:, None]
    for i in range(pattern.random):
        largest = count - pattern.random + i
        index = drawn[:, i] * (largest + 1) >> BITS
        index = torch.where((chosen == index[:, None]).any(1), largest, index)
        chosen = torch.cat([chosen, torch.where(largest < 0, -1, index)[:, None]], 1)
    index = chosen[:, 1:]
    blocks = begin + index + torch.where(index >= (window - begin)[:, None], inside[:, None], 0)
    return torch.where(index < 0, -1, blocks)


class EncoderPlaces(Places):
    """Places of the tokens of an encoder, whose store are the T tokens."""

    def __init__(self, pattern: Pattern, cu_seqlens: Tensor):
        super().__init__(pattern, cu_seqlens, torch.zeros_like(cu_seqlens[1:]))

    def key_positions(self, sequence: Tensor, start: Tensor, size: int) -> Tensor:
        device, pattern, length = start.device, self.pattern, self.lengths[sequence, None]
        first = torch.arange(pattern.first, device=device).expand(len(start), -1)
        last = length - torch.arange(pattern.last, 0, -1, device=device)
        reach = reach_of(pattern)
        near = start[:, None] + torch.arange(-reach, size + reach, device=device)
        position = torch.cat([first, last, self.drawn(start, length), near], 1)
        return position.masked_fill(position >= length, -1)

    def drawn(self, start: Tensor, length: Tensor) -> Tensor:
        """Returns the positions [G, random · block] in random blocks; −1 for global tokens, which are listed before."""
        pattern = self.pattern
        if not pattern.random:
            return length[:, :0]
        blocks = random_blocks(pattern, start // pattern.block, length[:, 0])[..., None]
        position = (blocks * pattern.block + torch.arange(pattern.block, device=start.device)).flatten(1)
        return position.masked_fill((position < pattern.first) | (position >= length - pattern.last), -1)

    def find(self, position: Tensor, sequence: Tensor) -> Tensor:
        return self.starts[sequence, None] + position.clamp(min=0)


class SymmetricSoftmax(PatternSoftmax):
    """The dense attention of an encoder's groups."""

    def allowed(self, own: Tensor, position: Tensor) -> Tensor:
        pattern = self.pattern
        near = torch.arange(position.shape[2], device=position.device) >= pattern.far + pattern.last
        unit = unit_of(pattern)
        units = (own // unit - position // unit).abs()
        return (position >= 0) & ((units * unit <= reach_of(pattern)) == near)


class GlobalTokens(NamedTuple):
    """The global tokens of successive sequences of the same length."""

    length: int
    own: Tensor  # [g], positions in each sequence
    rows: Tensor  # [n, g], indices among the tokens of all sequences


def global_tokens(pattern: Pattern, lengths: list[int], device: torch.device) -> list[GlobalTokens]:
    """Returns the global tokens of sequences of these lengths, which follow one another."""
    tokens, start = [], 0
    for length, same in groupby(lengths):
        count, first = len(list(same)), min(pattern.first, length)
        positions = [*range(first), *range(max(first, length - pattern.last), length)]
        own = torch.tensor(positions, dtype=torch.long, device=device)
        starts = torch.arange(start, start + count * length, max(length, 1), device=device)
        tokens += [GlobalTokens(length, own, starts[:, None] + own)] * bool(length)
        start += count * length
    return tokens


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, tokens: list[GlobalTokens], softmax: PatternSoftmax) -> Tensor:
    """Computes the attention of global tokens to all tokens of their sequences.

    q [R, H, d] of the global tokens; k, v [T, Hkv, d] -> [R, H, d]."""
    queries, keys = [t.rows.numel() for t in tokens], [len(t.rows) * t.length for t in tokens]
    out = []
    for t, *parts in zip(tokens, q.split(queries), k.split(keys), v.split(keys), strict=True):
        bias = None
        if softmax.bias is not None:
            bias = softmax.bias((t.own[:, None] - torch.arange(t.length, device=q.device))[None])
        qn, kn, vn = (x.unflatten(0, (len(t.rows), -1)) for x in parts)
        out.append(weigh(qn, kn, vn, bias=bias, null=softmax.null).flatten(0, 1))
    return torch.cat(out)


def symmetric_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax: SymmetricSoftmax) -> Tensor:
    """Computes attention with the pattern for packed sequences, in which the global tokens attend as the others do.

    q [T, H, d]; k, v [T, Hkv, d] -> [T, H, d]."""
    groups, mine = EncoderPlaces(softmax.pattern, cu_seqlens).all_groups()
    return attend_gathered(softmax, groups, q, k, v, softmax.parameters)[mine]
