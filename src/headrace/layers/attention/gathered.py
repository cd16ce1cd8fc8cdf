"""Attention of many small groups of queries, each to keys of its own choice, gathered from a store.

The gathered keys and values are many times the store. So they are made piece by piece and again in the backward: a
piece stays in cache, nothing is kept but what was gathered from, and a gradient is added where it belongs at once.

Dimensions: G groups of `size` queries, C columns, H query heads, Hkv key/value heads, d head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.derivatives import apply_function, first_order
from ...utils.device import without_autocast

NAME = "attention of gathered keys"
COLUMNS = {"cpu": 1 << 12}  # of a piece: as large as a cache. A GPU wants fewer and larger pieces.
COLUMNS_ELSEWHERE = 1 << 17


class Groups(NamedTuple):
    rows: Tensor  # [G, size], where the queries are among all queries
    columns: Tensor  # [G, C], where the keys are in the store
    own: Tensor  # [G, size], the position of each query in its sequence
    position: Tensor  # [G, C], the position of each key; negative: there is none

    def pieces(self) -> Iterator["Groups"]:
        columns = COLUMNS.get(self.rows.device.type, COLUMNS_ELSEWHERE)
        groups = max(1, columns // self.columns.shape[1])
        return (Groups(*parts) for parts in zip(*(x.split(groups) for x in self), strict=True))

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, k and v."""
        return self.rows, self.columns, self.columns

    def gather(self, *stores: Tensor) -> list[Tensor]:
        """q [T, H, d]; k, v [places, Hkv, d] -> q [G, size, H, d]; k, v [G, C, Hkv, d]."""
        return [gather(x, places) for x, places in zip(stores, self.places, strict=True)]


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
    """x[places]; as index_select, which is several times faster on a CPU, and so is its gradient."""
    return x.flatten(1).index_select(0, places.flatten()).view(*places.shape, *x.shape[1:])


def attend_gathered(
    dense: Dense, groups: Groups, q: Tensor, k: Tensor, v: Tensor, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """dense(q [G, size, H, d], k, v [G, C, Hkv, d], groups) of all groups -> [G, size, H, d].

    parameters: all that dense uses."""
    with without_autocast(q):  # the backward would not know of it
        trained = [p for p in parameters if p.requires_grad]
        return apply_function(Gathered, NAME, dense, groups, q, k, v, *trained)
