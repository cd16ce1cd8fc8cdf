"""Sequences cut into chunks of one size, so that all chunks are worked on at once and only states go from one to the
next.

Chunks lie by round: first that of every sequence, the longest ahead, then the second of those that have one, and so
on. The sequences of a round are then the first of those of the round before. What a chunk lacks in tokens is zeros.

Dimensions: B batch, T tokens, N sequences, M chunks, C tokens per chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...utils.device import without_autocast
from ..packing import Sequences

CHUNK = 32  # tokens per chunk of the matrix memories; a power of two
SPAN = 1024  # tokens that are worked on at once


class Chunks:
    """Where each token of x [B, T, ·] stands among the chunks."""

    def __init__(self, sequences: Sequences, x: Tensor, size: int, offsets: Tensor | None = None):
        """offsets [N]: the place of each sequence's first token in its first chunk; None: 0."""
        lengths = sequences.lengths(x)
        offsets = torch.zeros_like(lengths) if offsets is None else offsets
        chunks = torch.where(lengths > 0, -(-(lengths + offsets) // size), 0)
        self.order = chunks.argsort(descending=True, stable=True)
        self.rank = self.order.argsort()
        held = chunks.tolist()
        self.counts = [sum(n > i for n in held) for i in range(max(held, default=0))]
        self.size, self.shape = size, x.shape[:2]
        begins = torch.tensor([0, *self.counts], device=x.device).cumsum(0)
        owner = torch.arange(len(held), device=x.device).repeat_interleave(lengths)
        within = sequences.positions(None, x).expand(self.shape).flatten() + offsets[owner]
        self.places = (begins[within // size] + self.rank[owner]) * size + within % size

    def lay_out(self, x: Tensor) -> Tensor:
        """[B, T, ·] -> [M, C, ·]."""
        x = x.flatten(0, 1)
        full = x.new_zeros(sum(self.counts) * self.size, *x.shape[1:])
        return full.index_copy(0, self.places, x).unflatten(0, (-1, self.size))

    def take_back(self, y: Tensor) -> Tensor:
        """[M, C, ·] -> [B, T, ·]."""
        return y.flatten(0, 1)[self.places].unflatten(0, self.shape)

    def spans(self) -> list[list[int]]:
        """Neighbouring rounds, with the number of chunks of each, of about SPAN tokens together."""
        found: list[list[int]] = []
        filled = SPAN
        for count in self.counts:
            if filled >= SPAN:
                found.append([])
                filled = 0
            found[-1].append(count)
            filled += count * self.size
        return found


def carry(advance: Callable[..., Tensor], S: Tensor, counts: list[int], *operands: Tensor) -> tuple[Tensor, Tensor]:
    """S ← advance(S, the operands of a chunk) over rounds of so many chunks; S [N, ·] by rank, operands [M, ·].

    Returns (the S that each chunk begins with [M, ·], the last S of every sequence [N, ·])."""
    before, ended = [], []
    for pieces in zip(*(x.split(counts) for x in operands), strict=True):
        S, rest = S.split([len(pieces[0]), len(S) - len(pieces[0])])
        before.append(S)
        ended.append(rest)
        S = advance(S, *pieces)
    return torch.cat(before), torch.cat([S, *reversed(ended)])


def chunkwise(form: Callable[..., tuple[Tensor, Tensor]], x: Any, sequences: Sequences, S: Tensor):
    """form(counts, S, *operands of these chunks, [M, C, ·]) -> (out [M, C, ·], S), span by span, for x [B, T, ·] and
    the memory before the first tokens, S [N, ·] -> (out [B, T, ·], the memory after the last ones).

    What a span computes on the way is computed again in the backward: kept for all tokens it would be several times as
    large as what is kept now, and slow, since all of it is new memory.
    """
    chunks = Chunks(sequences, x[0], CHUNK)
    S, spans, out = S[chunks.order], chunks.spans(), [x[2].new_zeros(0, CHUNK, *x[2].shape[2:])]
    sizes = [sum(counts) for counts in spans]
    for counts, *pieces in zip(spans, *(chunks.lay_out(y).split(sizes) for y in x), strict=True):
        if len(spans) == 1:
            y, S = form(counts, S, *pieces)
        else:
            y, S = checkpoint(form, counts, S, *pieces, use_reentrant=False, preserve_rng_state=False)
        out.append(y)
    return chunks.take_back(torch.cat(out)), S[chunks.rank]


def recur(step: Callable, form: Callable, x: Any, sequences: Sequences, S: Tensor | None) -> tuple[Tensor, Tensor]:
    """out [B, T, H, V] and the memory after the last tokens [N, H, K, V] of a mixer that keeps a matrix per head.

    Args:
        step(x, S): one token of each sequence.
        form: many tokens, as `chunkwise` takes it.
        x: q, k [B, T, H, K], v [B, T, H, V] and what else there is, in the precision of the memory.
        S: the memory before the first tokens; None: zeros.
    """
    q, _, v = x[:3]
    with without_autocast(q):  # the precision of the memory is part of the definition
        S = q.new_zeros(sequences.count, *q.shape[2:], v.shape[-1]) if S is None else S
        if q.shape[1] == 1 and sequences.cu_seqlens is None:
            return step(x, S)
        return chunkwise(form, x, sequences, S)
