"""Attention of groups of queries to keys and values that are gathered from a store.

The gathered keys and values are many times larger than the store. They are therefore gathered piece by piece, and again
in the backward: a piece fits into the processor's cache, and only the store is saved.

Dimensions: G groups of `size` queries, C columns, H query heads, Hkv key/value heads, d head dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.derivatives import apply_function, first_order
from ...utils.device import without_autocast

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
