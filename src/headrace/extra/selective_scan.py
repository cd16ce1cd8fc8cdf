"""Mamba's selective scan (arXiv 2312.00752, algorithm 2). The states are S times as large as the inputs. They are
computed tile by tile, and again in the backward, from the state before each tile, which is saved.

Dimensions: T packed tokens, n sequences, L tokens of a tile, S state numbers per channel, D channels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.derivatives import apply_function, first_order
from ..ops.sequences import Sequences
from ..utils.device import without_autocast
from . import native_scan as native
from .scan import Pack, Tile, backwards, scan_packed_

NAME = "the selective scan"
TILE = 2**19  # number of elements of a tile's states, small enough for a core's cache


class Operands(NamedTuple):
    """The operands of the scan, all in one precision."""

    u: Tensor  # [T, D]
    dt: Tensor  # [T, D], ≥ 0
    A: Tensor  # [S, D], ≤ 0
    B: Tensor  # [T, S]
    C: Tensor  # [T, S]
    initial: Tensor  # [n, S, D]


def selective_scan(operands: Operands, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Computes h_t = exp(dt_t A) h_{t−1} + dt_t u_t B_t, y_t = C_t h_t for these sequences, one after another.

    Returns (y [T, D], the last state of each sequence [n, S, D])."""
    if native.unsupported_reason(operands.u, operands.A) is None:
        return native.selective_scan(operands, sequences.all_bounds())
    return scan_tiles(operands, sequences.counts())


def scan_tiles(operands: Operands, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Computes `selective_scan` in PyTorch, tile by tile, for sequences of these lengths."""
    with without_autocast(operands.u):
        return apply_function(SelectiveScan, NAME, lengths, *operands)


def selective_step(operands: Operands) -> tuple[Tensor, Tensor]:
    """Computes `selective_scan` for one token of each of T sequences."""
    u, dt, A, B, C, initial = operands
    h = torch.exp(dt[:, None] * A) * initial + (dt * u)[:, None] * B[..., None]
    return (C[..., None] * h).sum(1), h


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: list[int], *operands: Tensor) -> tuple[Tensor, Tensor]:
        x = Operands(*operands)
        out, final, carry, carries = torch.empty_like(x.u), x.initial.clone(), torch.zeros_like(x.A), []
        for tile in _tiles(x, lengths):
            carries.append(carry)
            *_, h = tile_states(x, tile, carry)
            out[tile.tokens] = torch.bmm(x.C[tile.tokens, None], h)[:, 0]
            final[tile.ended] = h[tile.last]
            carry = h[-1] if tile.goes_on else torch.zeros_like(x.A)
        ctx.lengths, ctx.carries = lengths, carries
        ctx.save_for_backward(*operands)
        return out, final

    @staticmethod
    @first_order(NAME)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x = Operands(*ctx.saved_tensors)
        d = Operands(*map(torch.zeros_like, x))
        d.initial.copy_(grads[1])  # a sequence without tokens ends as it begins; the others are overwritten
        d_carry = torch.zeros_like(x.A)
        for tile, carry in zip(reversed(_tiles(x, ctx.lengths)), reversed(ctx.carries), strict=True):
            own, (a, within, h) = tile.tokens, tile_states(x, tile, carry)
            d.C[own] = torch.bmm(h, grads[0][own, :, None])[..., 0]
            dh = x.C[own, :, None] * grads[0][own, None]
            dh[tile.last] += grads[1][tile.ended]
            if tile.goes_on:
                dh[-1] += d_carry
            before = torch.cat([carry[None], h[:-1]])
            before[tile.first] = x.initial[tile.begun]
            d_carry = operand_gradients(x, d, tile, a, before, backwards(within, dh))
        return None, *d


def tile_states(x: Operands, tile: Tile, carry: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (decays, decays with 0 at the start of each sequence, states) of a tile, [L, S, D] each. carry: the state
    before the tile."""
    own = tile.tokens
    a = torch.mul(x.dt[own, None], x.A).exp_()
    h = (x.dt[own] * x.u[own])[:, None] * x.B[own, :, None]
    h[0].addcmul_(a[0], carry)
    h[tile.first] += a[tile.first] * x.initial[tile.begun]
    within = a.index_fill(0, tile.first, 0.0)
    scan_packed_(within.clone(), h)
    return a, within, h


def operand_gradients(x: Operands, d: Operands, tile: Tile, a: Tensor, before: Tensor, dh: Tensor) -> Tensor:
    """Stores a tile's gradients in d, and returns the gradient to the state before the tile.

    a: the tile's decays; before: h_{t−1}; dh: gradients to h_t, which are overwritten; all [L, S, D]."""
    own = tile.tokens
    written = torch.bmm(x.B[own, None], dh)[:, 0]
    d.B[own] = torch.bmm(dh, (x.dt[own] * x.u[own])[..., None])[..., 0]
    d.u[own] = written * x.dt[own]
    d_before = dh.mul_(a)
    d.initial[tile.begun] = d_before[tile.first]
    d_carry = d_before[0].clone()
    d_log = d_before.mul_(before)
    d.A.add_((d_log * x.dt[own, None]).sum(0))
    d.dt[own] = d_log.mul_(x.A).sum(1) + written * x.u[own]
    return d_carry


def _tiles(x: Operands, lengths: list[int]) -> list[Tile]:
    return Pack(lengths, x.u.device).tiles(max(TILE // x.A.numel(), 1))
