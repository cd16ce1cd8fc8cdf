"""The delta rule with separate keys for the read (r), the erasure (e) and the write (k) of an update, S ← (diag(e^g) −
eᵀ r) S + kᵀ v: a transition that is diagonal plus low rank (DPLR), for any g ≤ 0.

Dimensions: B batch, T tokens, H heads, K key, V value dimension per head, N sequences, M chunks, C tokens per chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.backends.torch.decay import hidden
from ...ops.backends.torch.halves import LEAST, block_of
from ...ops.sequences import avoid_sync
from ..chunks import carry


class Operands(NamedTuple):
    """The operands of the recurrence, v [B, T, H, V] and the others [B, T, H, K], all in one precision."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor  # g ≤ 0
    read: Tensor  # r, what is read from the memory before its decay
    erase: Tensor  # e


def form(counts: list[int], S: Tensor, *operands: Tensor, base: int | None = None) -> tuple[Tensor, Tensor]:
    """Computes S_t = (diag(e^{g_t}) − eraseᵀ read) S_{t−1} + kᵀ v and out = q S_t for chunks, as `chunks.chunkwise`
    requires. base: as in `scores`; None: the largest that the values allow, and 1 where knowing them would wait for a
    device.

    The reads E of the chunk's tokens solve a unit-triangular system. E, out and the next state are affine in the state
    S before the chunk, so that all chunks are solved in parallel. With G the cumulative sum of g in a chunk:

        (I + A) E = rows(read) S + scores(read, k) v,   A = scores(read, erase), both strictly lower
        out = rows(q) S + scores(q, k) v − scores(q, erase) E        S ← e^{G_C} S + cols(k)ᵀ v − cols(erase)ᵀ E
    """
    q, k, v, g, read, erase = (y.transpose(1, 2) for y in operands)
    base = base or (1 if avoid_sync(g) else block_of(g.detach()))
    g = g.double().clamp(min=LEAST)
    G = g.cumsum(2)
    since, left = G.to(q.dtype).exp(), (G[:, :, -1:] - G).to(q.dtype).exp()
    # A token reads the state after the one before it: its scores are those of a query of that token, a row further up.
    readers = torch.stack([q, read.roll(-1, 2)], 2)
    of_q, of_read = scores(readers, torch.stack([k, erase], 2), G[:, :, None], base).unbind(2)
    (qk, qe), (rk, re) = of_q.unbind(2), F.pad(of_read[..., :-1, :], (0, 0, 1, 0)).unbind(2)
    rows = torch.cat([read * (G - g).to(q.dtype).exp(), rk @ v], -1)
    E = torch.linalg.solve_triangular(re, rows, upper=False, unitriangular=True)
    K, V = q.shape[-1], v.shape[-1]
    out = torch.cat([q * since, qk @ v], -1) - qe @ E
    fade = torch.diag_embed(since[:, :, -1])
    end = torch.cat([fade, (k * left).mT @ v], -1) - (erase * left).mT @ E
    starts, S = carry(lambda S, A, b: A @ S + b, S, counts, *end.split([K, V], -1))
    linear, constant = out.split([K, V], -1)
    return (linear @ starts + constant).transpose(1, 2), S


def scores(x: Tensor, y: Tensor, G: Tensor, base: int) -> Tensor:
    """Returns Σ_k x_ik y_jk e^{G_i − G_j} for the readers i at or after the writers j, and 0 else: [M, H, R, W, C, C].

    Args:
        x: readers of R kinds, [M, H, R, C, K].
        y: writers of W kinds, [M, H, W, C, K].
        G: cumulative sum of the log decay, [M, H, 1, C, K], in float64.
        base: size of the blocks of tokens that are one product, of exponents of both signs, which overflow for −g above
            88 / base a token in float32. All others are split at the last token of the first half of a larger block, so
            that no exponent is positive. 1 is for any g.
    """
    exp = lambda exponent: exponent.to(x.dtype).exp()  # noqa: E731
    pairs = lambda x, y: torch.einsum("mhrnik,mhwnjk->mhrwnij", x, y)  # noqa: E731
    blocks = [z.unflatten(3, (-1, base)) for z in (x, y, G)]
    middle = blocks[2][..., (base - 1) // 2, None, :]
    A = pairs(blocks[0] * exp(blocks[2] - middle), blocks[1] * exp(middle - blocks[2]))
    A = A.masked_fill(hidden(1, base, x.device), 0)
    for m in (base << i for i in range((x.shape[3] // base).bit_length() - 1)):
        (_, late), (early, _), (G_early, G_late) = (z.unflatten(3, (-1, 2, m)).unbind(4) for z in (x, y, G))
        border = G_early[..., -1:, :]
        across = pairs(late * exp(G_late - border), early * exp(border - G_early))
        first, second = A.unflatten(4, (-1, 2)).unbind(5)
        A = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([across, second], -1)], -2)
    return A.squeeze(4)


def step(x: Operands, S: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each sequence: x [N, 1, H, ·], S [N, H, K, V]."""
    q, k, v, g, read, erase = (y.transpose(1, 2) for y in x)
    S = g.mT.exp() * S - erase.mT @ (read @ S) + k.mT @ v
    return (q @ S).transpose(1, 2), S
