"""The delta rule with separate keys for the read (r), the erasure (e) and the write (k) of an update, S ← (diag(e^g) −
eᵀ r) S + kᵀ v: a transition that is diagonal plus low rank (DPLR), for any g ≤ 0.

Dimensions: B batch, T tokens, H heads, K key, V value dimension per head, N sequences, M chunks, C tokens per chunk.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.derivatives import transformed
from ..ops.sequences import avoid_sync
from ..utils.device import float64
from .chunks import carry

LEAST = -1000.0  # lower bound of log_decay: e^LEAST is 0 in float64, and −∞ would give NaN differences of sums
LONGEST, MOST = 16, 64.0  # tokens of a block, and the largest exponent in it
Levels = list[tuple[Tensor, Tensor]]  # factors of the decay of readers and writers, [M, H, blocks, tokens, K]


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
    requires. base: as in `decays`; None: the largest that the values allow, and 1 where knowing them would wait for a
    device.

    The reads E of the chunk's tokens solve a unit-triangular system. E, out and the next state are affine in the state
    S before the chunk, so that all chunks are solved in parallel. With G the cumulative sum of g in a chunk:

        (I + A) E = rows(read) S + scores(read, k) v,   A = scores(read, erase), both strictly lower
        out = rows(q) S + scores(q, k) v − scores(q, erase) E        S ← e^{G_C} S + cols(k)ᵀ v − cols(erase)ᵀ E
    """
    q, k, v, g, read, erase = (y.transpose(1, 2) for y in operands)
    base = base or (1 if avoid_sync(g) or transformed() else block_of(g.detach()))
    g = float64(g).clamp(min=LEAST)
    G, exp = g.cumsum(2), lambda exponent: exponent.to(q.dtype).to(q.device).exp()
    since, left = exp(G), exp(G[:, :, -1:] - G)
    # A token reads the state after the one before it: its scores are those of a query of that token, a row further up.
    levels = decays(G, base, exp)
    of_q, of_read = (scaled(x, levels, 0) for x in (q, read.roll(-1, 2)))
    of_k, of_erase = (scaled(x, levels, 1) for x in (k, erase))
    qk, qe = scores(of_q, of_k), scores(of_q, of_erase)
    rk, re = (F.pad(scores(of_read, y)[..., :-1, :], (0, 0, 1, 0)) for y in (of_k, of_erase))
    rows = torch.cat([read * exp(G - g), rk @ v], -1)
    E = torch.linalg.solve_triangular(re, rows, upper=False, unitriangular=True)
    K, V = q.shape[-1], v.shape[-1]
    out = torch.cat([q * since, qk @ v], -1) - qe @ E
    fade = torch.diag_embed(since[:, :, -1])
    end = torch.cat([fade, (k * left).mT @ v], -1) - (erase * left).mT @ E
    starts, S = carry(lambda S, A, b: A @ S + b, S, counts, *end.split([K, V], -1))
    linear, constant = out.split([K, V], -1)
    return (linear @ starts + constant).transpose(1, 2), S


def decays(G: Tensor, base: int, exp: Callable[[Tensor], Tensor]) -> Levels:
    """Splits e^{G_i − G_j} for readers i and writers j of the same blocks of tokens into factors of i and of j.

    The first level has blocks of `base` tokens and exponents of both signs, which overflow for −g above 176 / base a
    token in float32; base=1 is for any g. The further levels are those of `decays_between`.

    Args:
        G: cumulative sum of the log decay of a chunk, [M, H, C, K], in float64.
        base: a power of two up to C.
        exp: the exponential function, in the precision and on the device of the operands.
    """
    blocks = G.unflatten(2, (-1, base))
    middle = blocks[..., (base - 1) // 2, None, :]
    return [(exp(blocks - middle), exp(middle - blocks)), *decays_between(G, base, exp)]


def block_of(log_decay: Tensor) -> int:
    """Returns the base of `decays`: LONGEST if no decay over so many tokens can exceed e^MOST, else 1, also if a decay
    is NaN, so that the NaN affects no earlier token.

    There is nothing between: in a block of 4 tokens, decays of −16 a token do not overflow, but the gradient to them
    is a difference of sums whose terms are up to e^16 times as large."""
    low, high = log_decay.aminmax() if log_decay.numel() else (log_decay.new_zeros(()),) * 2
    return LONGEST if float(torch.maximum(-low, high)) * LONGEST <= MOST else 1


def decays_between(G: Tensor, base: int, exp: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields these factors for readers in the second and writers in the first half of blocks of 2 base, 4 base, …
    tokens, split at the last token of the first half, so that no exponent is positive."""
    for early, late in (halves(G, base << i) for i in range((G.shape[2] // base).bit_length() - 1)):
        border = early[..., -1:, :]
        yield exp(late - border), exp(border - early)


def halves(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Returns the first and second halves [M, H, n, m, ·] of the blocks of 2 m tokens of x [M, H, C, ·]."""
    first, second = x.unflatten(2, (-1, 2, m)).unbind(3)
    return first, second


def scaled(x: Tensor, levels: Levels, side: int) -> list[Tensor]:
    """Returns x [M, H, C, K] times the factors of each level, of readers (side 0) or writers (side 1)."""
    first, *others = (level[side] for level in levels)
    return [x.unflatten(2, first.shape[2:4]) * first, *(halves(x, y.shape[3])[1 - side] * y for y in others)]


def scores(x: list[Tensor], y: list[Tensor]) -> Tensor:
    """Returns Σ_k x_ik y_jk e^{G_i − G_j} for the readers i at or after the writers j, and 0 else, [M, H, C, C]."""
    A = (x[0] @ y[0].mT).tril()
    for late, early in zip(x[1:], y[1:], strict=True):
        first, second = A.unflatten(2, (-1, 2)).unbind(3)
        upper, lower = [first, torch.zeros_like(first)], [late @ early.mT, second]
        A = torch.cat([torch.cat(upper, -1), torch.cat(lower, -1)], -2)
    return A.squeeze(2)


def step(x: Operands, S: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each sequence: x [N, 1, H, ·], S [N, H, K, V]."""
    q, k, v, g, read, erase = (y.transpose(1, 2) for y in x)
    S = g.mT.exp() * S - erase.mT @ (read @ S) + k.mT @ v
    return (q @ S).transpose(1, 2), S
