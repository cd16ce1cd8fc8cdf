"""FlashAttention (arXiv 2205.14135) in plain PyTorch, for study: softmax attention by tiles, without a T × T matrix.

The forward visits each row of scores in tiles, and keeps their maximum m, the sum l of their exponentials and an
unnormalized output; l and the output are rescaled whenever the maximum increases. The backward recomputes the scores of
each tile; with the log-sum-exp lse = m + log l of a row, its softmax is e^(s − lse).

Dimensions: B batch, T queries, L keys, H heads, d head dimension; the queries are the last T of the L tokens.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.call import accumulator
from ...ops.derivatives import apply_function, first_order
from ...utils.device import without_autocast

NAME = "flash_attention"
TILE = 64


class Mask(NamedTuple):
    """The keys that each query attends to."""

    causal: bool
    ahead: int  # L − T: number of keys before the first query
    # [B, L], False marks padding, which, if causal, attends to itself; or [B, T, L], the pairs of a pack; None: none
    valid: Tensor | None

    def hidden(self, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """Returns the mask [1 or B, 1, rows, columns] of a tile, True where the query does not attend to the key."""
        i = self.ahead + torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(columns.start, columns.stop, device=device)
        hidden = ((j > i) & self.causal)[None, None]
        if self.valid is None:
            return hidden
        if self.valid.dim() == 3:
            return hidden | ~self.valid[:, None, rows, columns]
        return hidden | ~self.valid[:, None, None, columns] & ((i != j) | (not self.causal))

    def unseen(self, rows: slice, columns: slice) -> bool:
        """Whether all pairs of a tile are hidden by causality."""
        return self.causal and columns.start > self.ahead + rows.stop - 1


def tiles(length: int) -> Iterator[slice]:
    """Splits `length` rows or columns into slices of TILE."""
    return (slice(start, min(start + TILE, length)) for start in range(0, length, TILE))


def scores(q: Tensor, k: Tensor, mask: Mask, rows: slice, columns: slice) -> Tensor:
    """Returns the logits of a tile. Hidden logits are very negative but finite, so that a row that begins with hidden
    tiles is not NaN; after its first visible key, their e^(s − m) is 0."""
    s = q[:, :, rows] @ k[:, :, columns].mT * q.shape[-1] ** -0.5
    return s.masked_fill(mask.hidden(rows, columns, q.device), torch.finfo(s.dtype).min / 2)


class Flash(torch.autograd.Function):
    """q [B, H, T, d]; k, v [B, H, L, d] -> out [B, H, T, d]; the rows' log-sum-exp lse is [B, H, T, 1]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3], 1)
        for rows in tiles(q.shape[2]):
            o = torch.zeros_like(q[:, :, rows])
            m = torch.full_like(o[..., :1], torch.finfo(q.dtype).min)
            l = torch.zeros_like(m)
            for columns in tiles(k.shape[2]):
                if mask.unseen(rows, columns):
                    break
                s = scores(q, k, mask, rows, columns)
                higher = torch.maximum(m, s.amax(-1, keepdim=True))
                p, shrink = torch.exp(s - higher), torch.exp(m - higher)
                l = shrink * l + p.sum(-1, keepdim=True)
                o = shrink * o + p @ v[:, :, columns]
                m = higher
            out[:, :, rows], lse[:, :, rows] = o / l, m + l.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask = mask
        return out

    @staticmethod
    @first_order(NAME)
    def backward(ctx: Any, dout: Tensor):  # type: ignore[override]
        """A softmax row p with gradient dp has ds = p (dp − ⟨p, dp⟩), where ⟨p, dp⟩ = ⟨out, dout⟩."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        delta, scale = (out * dout).sum(-1, keepdim=True), q.shape[-1] ** -0.5
        for rows in tiles(q.shape[2]):
            do = dout[:, :, rows]
            for columns in tiles(k.shape[2]):
                if ctx.mask.unseen(rows, columns):
                    break
                p = torch.exp(scores(q, k, ctx.mask, rows, columns) - lse[:, :, rows])
                dv[:, :, columns] += p.mT @ do
                ds = p * (do @ v[:, :, columns].mT - delta[:, :, rows]) * scale
                dq[:, :, rows] += ds @ k[:, :, columns]
                dk[:, :, columns] += ds.mT @ q[:, :, rows]
        return dq, dk, dv, None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, valid: Tensor | None = None) -> Tensor:
    """Computes `sdpa.attend` by tiles: q [B, T, H, d]; k, v [B, L, Hkv, d], where Hkv divides H; valid [B, L] ->
    [B, T, H, d]. Sums are float64 for float64 inputs, else float32."""
    groups, acc = q.shape[2] // k.shape[2], accumulator(q)
    mask = Mask(causal, k.shape[1] - q.shape[1], valid)
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    with without_autocast(q):
        out = apply_function(Flash, NAME, *(x.transpose(1, 2).to(acc) for x in (q, k, v)), mask)
    return out.transpose(1, 2).to(q.dtype)
