"""The short convolution: y = silu(z), z_t = b + Σ_j w_j x_{t−j}, with the tokens before a sequence from `history`.

x, y [tokens, D], weight [D, W] with w_{W−1} … w_0 as its columns, bias b [D] or None, history [N, W − 1, D].
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...convolution import like
from .launch import in_chunks, one_stride, strides

TOKENS, CHANNELS = 64, 64  # of a program


@triton.jit
def place(T, cu_seqlens, first_chunk, owner, PACKED: tl.constexpr, C: tl.constexpr):
    """Returns (sequence, its first token, its length, the indices in it of the program's tokens [C])."""
    chunk = tl.program_id(0)
    if PACKED:
        n = tl.load(owner + chunk).to(tl.int64)
        start = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
        chunk -= tl.load(first_chunk + n)
    else:
        n = (chunk // tl.cdiv(T, C)).to(tl.int64)
        start, length = n * T, T + 0
        chunk = chunk % tl.cdiv(T, C)
    return n, start, length, chunk * C + tl.arange(0, C)


@triton.jit
def earlier(x, history, n, start, length, at, j, channels, stride, D: tl.constexpr, W: tl.constexpr):
    """Loads x_{t−j} for the tokens with the indices `at`, [C, BD]."""
    source, known = at - j, (at < length)[:, None] & (channels < D)[None, :]
    inside = known & (source >= 0)[:, None]
    found = tl.load(x + (start + source)[:, None] * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    before = history + (n * (W - 1) + W - 1 + source)[:, None] * D + channels[None, :]
    return found + tl.load(before, mask=known & (source < 0)[:, None], other=0.0).to(tl.float32)


@triton.jit
def tap(weight, j, channels, D: tl.constexpr, W: tl.constexpr):
    """Loads w_j, [1, BD]."""
    return tl.load(weight + channels * W + W - 1 - j, mask=channels < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def summed(x, weight, bias, history, n, start, length, at, channels, stride, D: tl.constexpr, W: tl.constexpr):
    """Returns z [C, BD]."""
    z = tl.zeros((at.shape[0], channels.shape[0]), tl.float32)
    if bias is not None:
        z += tl.load(bias + channels, mask=channels < D, other=0.0).to(tl.float32)[None, :]
    for j in range(W):
        z += tap(weight, j, channels, D, W) * earlier(x, history, n, start, length, at, j, channels, stride, D, W)
    return z


@triton.jit(do_not_specialize=["T", "x_stride"])
def convolve(
    x, weight, bias, history, y, cu_seqlens, first_chunk, owner, T, x_stride,
    D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, blocks of D). Writes y."""
    n, start, length, at = place(T, cu_seqlens, first_chunk, owner, PACKED, C)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    z = summed(x, weight, bias, history, n, start, length, at, channels, x_stride * ALIGN, D, W)
    known = (at < length)[:, None] & (channels < D)[None, :]
    into = y + (start + at)[:, None] * D + channels[None, :]
    tl.store(into, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["T", "x_stride"])
def slopes(
    x, weight, bias, history, d_y, d_z, d_weight, d_bias, cu_seqlens, first_chunk, owner, T, x_stride,
    D: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, blocks of D). Writes d_z [tokens, D], and of each chunk's tokens d_weight [chunks, D, W] and
    d_bias [chunks, D]."""
    n, start, length, at = place(T, cu_seqlens, first_chunk, owner, PACKED, C)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    z = summed(x, weight, bias, history, n, start, length, at, channels, x_stride * ALIGN, D, W)
    known, places = (at < length)[:, None] & (channels < D)[None, :], (start + at)[:, None] * D + channels[None, :]
    share = tl.sigmoid(z)
    slope = tl.load(d_y + places, mask=known, other=0.0).to(tl.float32) * share * (1 + z * (1 - share))
    tl.store(d_z + places, slope, mask=known)
    into = tl.program_id(0).to(tl.int64) * D + channels
    tl.store(d_bias + into, tl.sum(slope, 0), mask=channels < D)
    for j in range(W):
        seen = earlier(x, history, n, start, length, at, j, channels, x_stride * ALIGN, D, W)
        tl.store(d_weight + into * W + W - 1 - j, tl.sum(slope * seen, 0), mask=channels < D)


@triton.jit
def later(d_z, weight, start, length, at, channels, D: tl.constexpr, W: tl.constexpr):
    """Returns Σ_j w_j d_z_{t+j} of the tokens with the indices `at`, which may be below 0, [C, BD]."""
    found = tl.zeros((at.shape[0], channels.shape[0]), tl.float32)
    for j in range(W):
        source = at + j
        inside = ((source >= 0) & (source < length))[:, None] & (channels < D)[None, :]
        each = tl.load(d_z + (start + source)[:, None] * D + channels[None, :], mask=inside, other=0.0)
        found += tap(weight, j, channels, D, W) * each
    return found


@triton.jit(do_not_specialize=["T"])
def spread(
    d_z, weight, d_x, d_history, cu_seqlens, first_chunk, owner, T,
    D: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, blocks of D). Writes d_x, and d_history of sequences with tokens. BW: W − 1 or more."""
    n, start, length, at = place(T, cu_seqlens, first_chunk, owner, PACKED, C)
    channels = tl.program_id(1) * BD + tl.arange(0, BD)
    into = d_x + (start + at)[:, None] * D + channels[None, :]
    found = later(d_z, weight, start, length, at, channels, D, W)
    tl.store(into, found.to(d_x.dtype.element_ty), mask=(at < length)[:, None] & (channels < D)[None, :])
    if (tl.min(at, 0) == 0) & (length > 0):
        rows = tl.arange(0, BW)
        earliest = later(d_z, weight, start, length, rows - (W - 1), channels, D, W)
        before = d_history + (n * (W - 1) + rows)[:, None] * D + channels[None, :]
        tl.store(before, earliest, mask=(rows < W - 1)[:, None] & (channels < D)[None, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    given, common, grid = _launch(x, weight, bias, history, cu_seqlens)
    y = like(x)
    with torch.cuda.device_of(x):
        convolve[grid](**given, y=y, **strides(x=given["x"]), **common)
    return y


def backward(
    d_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given, common, grid = _launch(x, weight, bias, history, cu_seqlens)
    d_x, d_z = like(x), torch.empty(x.shape, dtype=torch.float32, device=x.device)
    d_weight, d_bias = d_z.new_empty(grid[0], *weight.shape), d_z.new_empty(grid[0], len(weight))
    d_history = d_z.new_zeros(history.shape)  # a sequence without tokens is in no chunk
    with torch.cuda.device_of(x):
        slopes[grid](
            **given, d_y=d_y.contiguous(), d_z=d_z, d_weight=d_weight, d_bias=d_bias, **strides(x=given["x"]),
            **common,
        )  # fmt: skip
        BW = triton.next_power_of_2(max(weight.shape[2] - 1, 1))
        spread[grid](d_z, given["weight"], d_x=d_x, d_history=d_history, BW=BW, **common)
    return d_x, d_weight.sum(0), d_bias.sum(0), d_history


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor | None
) -> tuple[dict, dict[str, Any], Any]:
    """Returns what both ways read, the arguments of all kernels, and the grid."""
    B, T, D = x.shape
    chunks, packed, owner = in_chunks(cu_seqlens, B, T, TOKENS)
    given: dict[str, Any] = {
        "x": one_stride(x[:, :, None]), "weight": weight.contiguous(), "bias": one_stride(bias),
        "history": history.contiguous(),
    }  # fmt: skip
    common = {
        **packed, "owner": owner, "T": T, "D": D, "W": weight.shape[2], "C": TOKENS, "BD": CHANNELS,
        "PACKED": cu_seqlens is not None, "num_warps": 4,
    }  # fmt: skip
    return given, common, (chunks, -(-D // CHANNELS))
