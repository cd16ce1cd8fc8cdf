"""Attention of groups of queries to keys and values that are gathered from a store, for sparse patterns.

A group is `size` successive queries of a sequence, beginning at a multiple of `size`. Its keys are listed by position.

The gathered keys and values are many times larger than the store. They are therefore gathered piece by piece, and again
in the backward: a piece fits into the processor's cache, and only the store is saved.

Dimensions: N sequences, G groups of `size` queries, C columns, H query heads, Hkv key/value heads, d head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.derivatives import apply_function, first_order
from ..spec.attention import Pattern
from ..utils.device import without_autocast

NAME = "attention of gathered keys"
COLUMNS = {"cpu": 1 << 12}  # number of columns of a piece, chosen for the cache of a CPU; a GPU needs larger pieces
COLUMNS_ELSEWHERE = 1 << 17


class Groups(NamedTuple):
    """Groups of queries and the places of their keys."""

    rows: Tensor  # [G, size], index of each query among all queries
    columns: Tensor  # [G, C], index of each key in the store
    own: Tensor  # [G, size], position of each query in its sequence
    position: Tensor  # [G, C], position of each key in its sequence; negative: no key

    def pieces(self) -> Iterator["Groups"]:
        """Splits the groups into pieces of about COLUMNS columns."""
        columns = COLUMNS.get(self.rows.device.type, COLUMNS_ELSEWHERE)
        groups = max(1, columns // self.columns.shape[1])
        return (Groups(*parts) for parts in zip(*(x.split(groups) for x in self), strict=True))

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of q, k and v in their stores."""
        return self.rows, self.columns, self.columns

    def gather(self, *stores: Tensor) -> list[Tensor]:
        """q [T, H, d]; k, v [places, Hkv, d] -> q [G, size, H, d]; k, v [G, C, Hkv, d]."""
        return [gather(x, places) for x, places in zip(stores, self.places, strict=True)]


class Places:
    """Places of the tokens of packed sequences in a store, and the groups of their queries.

    A subclass defines which positions a group may attend to, and where they are.

    Args:
        cu_seqlens: [N + 1], bounds of the new tokens' sequences.
        tokens: [N], number of tokens before the new ones.
    """

    def __init__(self, pattern: Pattern, cu_seqlens: Tensor, tokens: Tensor):
        self.pattern, self.starts, self.tokens = pattern, cu_seqlens[:-1], tokens
        self.lengths = cu_seqlens.diff()

    def key_positions(self, sequence: Tensor, start: Tensor, size: int) -> Tensor:
        """Returns the positions [G, C] that `size` queries of a sequence [G] from position start [G] on may attend to;
        negative: none."""
        raise TypeError(f"{type(self).__name__} does not define key_positions")

    def find(self, position: Tensor, sequence: Tensor) -> Tensor:
        """Returns the places of positions from `key_positions`; an arbitrary place for those that do not exist."""
        raise TypeError(f"{type(self).__name__} does not define find")

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

    def all_groups(self) -> tuple[Groups, Tensor]:
        """Returns all groups of queries, and a mask [G, size] of the queries that are new tokens."""
        sequence, start = self.groups(size := self.size())
        position = self.key_positions(sequence, start, size)
        own = start[:, None] + torch.arange(size, device=start.device)
        new = own - self.tokens[sequence, None]
        last = self.lengths[sequence, None] - 1
        rows = self.starts[sequence, None] + torch.minimum(new.clamp(min=0), last)
        own = torch.minimum(own, self.tokens[sequence, None] + last)  # else some would have no key: NaN
        return Groups(rows, self.find(position, sequence), own, position), (new >= 0) & (new <= last)


Dense = Callable[..., Tensor]  # q, k, v of the groups, the groups -> [G, size, H, d]


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Dense, groups: Groups, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.dense, ctx.groups, ctx.parameters = dense, groups, parameters
        return torch.cat([dense(*piece.gather(q, k, v), piece) for piece in groups.pieces()])

    @staticmethod
    @first_order(NAME)
    def backward(ctx: Any, dout: Tensor):  # type: ignore[override]
        stores, done = ctx.saved_tensors, 0
        totals = [torch.zeros_like(x) for x in (*stores, *ctx.parameters)]
        for piece in ctx.groups.pieces():
            inputs = [x.requires_grad_() for x in piece.gather(*stores)]
            with torch.enable_grad():
                out = ctx.dense(*inputs, piece)
            gradients = torch.autograd.grad(out, [*inputs, *ctx.parameters], dout[done : done + len(out)])
            done += len(out)
            for total, gradient, places in zip(totals[:3], gradients[:3], piece.places, strict=True):
                total.index_add_(0, places.flatten(), gradient.flatten(0, 1))
            for total, gradient in zip(totals[3:], gradients[3:], strict=True):
                total += gradient
        return None, None, *totals


def gather(x: Tensor, places: Tensor) -> Tensor:
    """Returns x[places], computed by index_select, which is several times faster on a CPU, forward and backward."""
    return x.flatten(1).index_select(0, places.flatten()).view(*places.shape, *x.shape[1:])


def attend_gathered(
    dense: Dense, groups: Groups, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """Returns dense(q [G, size, H, d], k, v [G, C, Hkv, d], groups) for all groups, [G, size, H, d].

    parameters: all parameters that dense uses."""
    with without_autocast(q):  # the backward would recompute without autocast
        trained = [p for p in parameters if p.requires_grad]
        return apply_function(Gathered, NAME, dense, groups, q, k, v, *trained)
