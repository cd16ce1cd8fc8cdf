"""Elementwise linear recurrences h_t = a_t h_{t−1} + b_t, parallel in time.

Sequences are packed, with time as the first dimension; a batch is packed sequences of equal length. Decays are factors
in 0..1 that are only multiplied, so that nothing overflows.

Dimensions: B batch, T tokens of a row or of a pack, n or N sequences, D or E channels, S state numbers
per channel.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.derivatives import apply_function, first_order
from ..ops.sequences import Sequences, avoid_sync

NAME = "a scan over time"


class ScanState(NamedTuple):
    """The recurrent state of N sequences; None for parts that the mixer does not have."""

    memory: Tensor  # [N, S, E]
    conv: Tensor | None = None  # [N, width − 1, E]
    shift: Tensor | None = None  # [N, 1, D]
    tokens: Tensor | None = None  # [N], number of tokens so far, of mixers whose first token differs


START: Any = ScanState(None)  # type: ignore[arg-type]  # of sequences without a token


def affine_(a: Tensor, b: Tensor, a_before: Tensor, b_before: Tensor) -> None:
    b.addcmul_(a, b_before)
    a.mul_(a_before)


def tropical_(a: Tensor, b: Tensor, a_before: Tensor, b_before: Tensor) -> None:
    b.clamp_min_(a + b_before)
    a.add_(a_before)


def scan_(a: Tensor, b: Tensor, join_: Callable[..., None] = affine_) -> None:
    """Computes b_t ← a_t b_{t−1} + b_t for all t of the first dimension, in place, and overwrites a. tropical_ computes
    b_t ← max(a_t + b_{t−1}, b_t).

    Joins tokens in pairs, scans the pairs, and fills in the tokens between: 3 operations per element and 2 log T steps
    (arXiv 1709.04057, section 2.2).
    """
    T = len(b)
    if T < 2:
        return
    join_(a[1::2], b[1::2], a[0 : T - 1 : 2], b[0 : T - 1 : 2])
    scan_(a[1::2], b[1::2], join_)
    join_(a[2::2], b[2::2], a[1 : T - 1 : 2], b[1 : T - 1 : 2])


def affine_isolated_(a: Tensor, b: Tensor, a_before: Tensor, b_before: Tensor) -> None:
    """`affine_` for values that need not be finite: where a is 0, nothing passes, not even 0 · NaN."""
    closed = a == 0
    b.add_((a * b_before).masked_fill_(closed, 0))
    a.copy_(torch.where(closed, a, a * a_before))


def tropical_isolated_(a: Tensor, b: Tensor, a_before: Tensor, b_before: Tensor) -> None:
    """`tropical_` for values that need not be finite: where a is −∞, nothing passes, not even −∞ + ∞."""
    closed = a == -torch.inf
    b.clamp_min_((a + b_before).masked_fill_(closed, -torch.inf))
    a.copy_(torch.where(closed, a, a + a_before))


ISOLATED = {affine_: affine_isolated_, tropical_: tropical_isolated_}


def scan_packed_(a: Tensor, b: Tensor, join_: Callable[..., None] = affine_) -> None:
    """Computes `scan_` for packed sequences: a is 0 at their first tokens (−∞ for tropical_), and what is not finite in
    a sequence does not reach the next. The faster join of finite values is not used in a compiled graph, which cannot
    ask for values, and on a GPU, which would have to wait for them."""
    finite = b.is_meta or (not avoid_sync(b) and bool(b.sum().isfinite()) and not bool(a.isnan().any()))
    scan_(a, b, join_ if finite else ISOLATED[join_])


class Tile(NamedTuple):
    """Consecutive tokens of packed sequences."""

    tokens: slice
    first: Tensor  # indices in the tile of the first tokens of sequences
    begun: Tensor  # the sequences of these tokens
    last: Tensor  # indices in the tile of the last tokens of sequences
    ended: Tensor  # the sequences of these tokens
    goes_on: bool  # whether the last token's sequence continues after the tile


class Pack:
    """Packed sequences of given lengths. Sequences without tokens are in no tile."""

    def __init__(self, lengths: list[int], device: torch.device):
        self.held = [n for n, length in enumerate(lengths) if length]
        self.ends = list(accumulate(lengths[n] for n in self.held))
        self.starts = [0, *self.ends[:-1]]
        self.T, self.device = sum(lengths), device

    def tile(self, low: int, high: int) -> Tile:
        """Returns the tile of the tokens low … high − 1."""
        begun = slice(sum(start < low for start in self.starts), sum(start < high for start in self.starts))
        ended = slice(sum(end <= low for end in self.ends), sum(end <= high for end in self.ends))
        return Tile(
            slice(low, high),
            self._index([start - low for start in self.starts[begun]]), self._index(self.held[begun]),
            self._index([end - 1 - low for end in self.ends[ended]]), self._index(self.held[ended]),
            goes_on=high not in self.ends[ended],
        )  # fmt: skip

    def tiles(self, size: int) -> list[Tile]:
        """Splits all tokens into tiles of `size` tokens."""
        return [self.tile(low, min(low + size, self.T)) for low in range(0, self.T, size)]

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


class Scan(torch.autograd.Function):
    """Computes h_t = a_t h_{t−1} + b_t from zero, for a and b [T, D]. a is 0 at the first token of a sequence."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        h = b.clone()
        scan_packed_(a.clone(), h)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    @first_order(NAME)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        dh = backwards(a, grads[0])
        return torch.cat([torch.zeros_like(h[:1]), dh[1:] * h[:-1]]), dh


def backwards(a: Tensor, dh: Tensor) -> Tensor:
    """Returns the total gradients to h_t, given the gradients dh that do not pass through h_{t+1}."""
    total = dh.flip(0)
    scan_packed_(a.roll(-1, 0).flip(0), total)
    return total.flip(0)


def packed_scan(a: Tensor, b: Tensor, initial: Tensor, whole: Tile) -> tuple[Tensor, Tensor]:
    """Returns (h_{t−1}, h_t) [T, D] of h_t = a_t h_{t−1} + b_t for packed sequences with initial states [n, D]."""
    begun = initial[whole.begun]
    b = b.index_add(0, whole.first, a[whole.first] * begun)
    h = apply_function(Scan, NAME, a.index_fill(0, whole.first, 0.0), b)
    return h.roll(1, 0).index_copy(0, whole.first, begun), h


def elementwise(a: Tensor, b: Tensor, memory: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Returns (h [B, T, D], the next memory [N, 1, D]) of h_t = a_t h_{t−1} + b_t, for a and b [B, T, D]. memory: None
    is zeros."""
    memory = a.new_zeros(sequences.count, 1, a.shape[-1]) if memory is None else memory
    if a.shape[1] == 1 and not sequences.packed:
        h = a * memory + b
        return h, h
    whole = Pack(sequences.counts(), a.device).tile(0, a.shape[0] * a.shape[1])
    _, h = packed_scan(a.flatten(0, 1), b.flatten(0, 1), memory[:, 0], whole)
    return h.view_as(a), memory.index_copy(0, whole.ended, h[whole.last, None])
