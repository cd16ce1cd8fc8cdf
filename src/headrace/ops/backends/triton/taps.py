"""The kernels of the short convolution: y = SiLU(z) or z, with z_t = b + Σ_j w_j x_{t − W + 1 + j} per channel, and its
gradients. A token before its sequence counts as zero.

Tiles are [R, BC], R tokens by BC channels. Tokens are counted through all rows of the batch, with a stride between them
in x. Sums are in float32.
"""

import triton
import triton.language as tl


@triton.jit
def places(starts, token, rows, total, T):
    """Returns the number of tokens of the same sequence before each token, −1 past the last token. starts: the first
    token of each token's sequence; None: sequences of T tokens each."""
    at = token + rows
    inside = at < total
    begin = at - at % T if starts is None else tl.load(starts + at, mask=inside, other=0)
    return tl.where(inside, at - begin, -1)


@triton.jit
def rows_of(x, stride, token, rows, kept, channels, C):
    """Loads a tile in float32; zeros where a row is not kept."""
    at = rows[:, None] * stride + channels[None, :]
    mask = kept[:, None] & (channels < C)[None, :]
    return tl.load(x + token * stride + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tap(weight, j, channels, C, W: tl.constexpr):
    return tl.load(weight + channels * W + j, mask=channels < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def convolved(x, weight, bias, stride, token, rows, place, channels, C, W: tl.constexpr):
    """Returns z of a tile."""
    z = tl.zeros((rows.shape[0], channels.shape[0]), tl.float32)
    if bias is not None:
        z += tap(bias, 0, channels, C, 1)
    for back in tl.static_range(W):
        read = rows_of(x, stride, token, rows - back, place >= back, channels, C)
        z += read * tap(weight, W - 1 - back, channels, C, W)
    return z


@triton.jit(do_not_specialize=["x_stride", "total", "T"])
def convolve(
    x, weight, bias, starts, y, x_stride, total, T, C, W: tl.constexpr, SILU: tl.constexpr, R: tl.constexpr,
    BC: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of tokens, tiles of channels). Writes y [tokens, C]."""
    token, rows = tl.program_id(0).to(tl.int64) * R, tl.arange(0, R)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    place = places(starts, token, rows, total, T)
    z = convolved(x, weight, bias, x_stride * ALIGN, token, rows, place, channels, C, W)
    if SILU:
        z *= tl.sigmoid(z)
    at, mask = rows[:, None] * C + channels[None, :], (place >= 0)[:, None] & (channels < C)[None, :]
    tl.store(y + token * C + at, z.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_stride"])
def convolve_token(
    x, weight, bias, history, y, after, x_stride, C, W: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr,
    TAPS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, tiles of channels). Writes y [N, C] of the token x, and the next history [N, W − 1, C] to
    `after`, which may be `history`. TAPS: a power of two, at least W."""
    n, taps = tl.program_id(0).to(tl.int64), tl.arange(0, TAPS)[:, None]
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    inside, at = (channels < C)[None, :], n * (W - 1) * C + taps * C + channels[None, :]
    here = tl.load(x + n * x_stride * ALIGN + channels[None, :], mask=inside, other=0.0)
    read = tl.where(taps == W - 1, here, tl.load(history + at, mask=(taps < W - 1) & inside, other=0.0))
    w = tl.load(weight + channels[None, :] * W + taps, mask=(taps < W) & inside, other=0.0)
    z = tl.sum(read.to(tl.float32) * w.to(tl.float32), 0)
    if bias is not None:
        z += tl.load(bias + channels, mask=channels < C, other=0.0).to(tl.float32)
    if SILU:
        z *= tl.sigmoid(z)
    tl.store(y + n * C + channels, z.to(y.dtype.element_ty), mask=channels < C)
    tl.debug_barrier()  # another thread may hold a copy of an entry of the history, and load it last
    tl.store(after + at - C, read, mask=(taps > 0) & (taps < W) & inside)


@triton.jit(do_not_specialize=["x_stride", "total", "T"])
def silu_backward(
    x, weight, bias, starts, d_y, d_z, x_stride, total, T, C, W: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of tokens, tiles of channels). Writes d_z [tokens, C], the gradient to z, which is computed anew."""
    token, rows = tl.program_id(0).to(tl.int64) * R, tl.arange(0, R)
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    place = places(starts, token, rows, total, T)
    z = convolved(x, weight, bias, x_stride * ALIGN, token, rows, place, channels, C, W)
    s = tl.sigmoid(z)
    result = rows_of(d_y, C, token, rows, place >= 0, channels, C) * s * (1 + z * (1 - s))
    at, mask = rows[:, None] * C + channels[None, :], (place >= 0)[:, None] & (channels < C)[None, :]
    tl.store(d_z + token * C + at, result.to(d_z.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_stride", "total", "T"])
def convolve_backward(
    x, weight, starts, d_z, d_x, d_weight, x_stride, total, T, C, W: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
    TILES: tl.constexpr, TAPS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of TILES tiles of tokens, tiles of channels). Writes d_x [tokens, C], and the sums of a group over
    its tokens, d_weight [groups, W + 1, C], with those of the bias last. TAPS: a power of two above W."""
    rows, stride = tl.arange(0, R), x_stride * ALIGN
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    taps = tl.arange(0, TAPS)[:, None]
    sums = tl.zeros((TAPS, BC), tl.float32)
    for i in range(TILES):
        token = (tl.program_id(0).to(tl.int64) * TILES + i) * R
        place = places(starts, token, rows, total, T)
        here = rows_of(d_z, C, token, rows, place >= 0, channels, C)
        d_rows = here * tap(weight, W - 1, channels, C, W)
        for ahead in tl.static_range(1, W):  # the token that reads this one by the tap W − 1 − ahead
            later = rows + ahead
            kept = places(starts, token, later, total, T) >= ahead
            d_rows += rows_of(d_z, C, token, later, kept, channels, C) * tap(weight, W - 1 - ahead, channels, C, W)
        for back in tl.static_range(W):
            read = rows_of(x, stride, token, rows - back, place >= back, channels, C)
            sums += tl.where(taps == W - 1 - back, tl.sum(here * read, 0)[None, :], 0.0)
        sums += tl.where(taps == W, tl.sum(here, 0)[None, :], 0.0)
        at = rows[:, None] * C + channels[None, :]
        mask = (token + rows < total)[:, None] & (channels < C)[None, :]
        tl.store(d_x + token * C + at, d_rows.to(d_x.dtype.element_ty), mask=mask)
    into = d_weight + tl.program_id(0).to(tl.int64) * (W + 1) * C + taps * C + channels[None, :]
    tl.store(into, sums, mask=(taps <= W) & (channels < C)[None, :])
