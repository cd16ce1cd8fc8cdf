"""The norm of q or k over its channels, and the rotary embedding: y = rotary(norm(x)).

x, y [tokens, heads, K], positions [tokens], or [T] for all rows of the batch. Channel i is turned with channel i + half
by the angle position · theta^(−i / half). Both halves of a head are loaded as [C, BH].
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..qk_norm import EPS, QKNorm
from .launch import one_stride

SIZE = 2048  # entries of each half that a program holds


@triton.jit
def place(tokens, stride, HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BH: tl.constexpr):
    """Returns the program's tokens [C], the offsets of their first halves into x and into y, and the masks of both
    halves, [C, BH]."""
    t, i = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C), tl.arange(0, BH)[None, :]
    known, h = (t < tokens)[:, None], tl.program_id(1)
    half: tl.constexpr = (K + 1) // 2
    at, into = t[:, None] * stride + h * K + i, (t[:, None] * HEADS + h) * K + i
    return t, at, into, known & (i < half), known & (i < K - half)


@triton.jit
def halves(x, at, first, second, K: tl.constexpr):
    a = tl.load(x + at, mask=first, other=0.0).to(tl.float32)
    return a, tl.load(x + at + (K + 1) // 2, mask=second, other=0.0).to(tl.float32)


@triton.jit
def store_halves(y, a, b, at, first, second, K: tl.constexpr):
    tl.store(y + at, a.to(y.dtype.element_ty), mask=first)
    tl.store(y + at + (K + 1) // 2, b.to(y.dtype.element_ty), mask=second)


@triton.jit
def cos_and_sin(turns):
    """Of 2π turns, |turns| ≤ ½, from the series of half the angle. tl.cos would reserve a stack for larger angles."""
    half = turns * 3.141592653589793
    square = half * half
    cos = tl.full(turns.shape, 1.0, tl.float32)
    sin = tl.full(turns.shape, 1.0, tl.float32)
    for n in tl.static_range(14, 0, -2):
        cos = 1 - square * cos * (1 / (n * (n - 1)))
        sin = 1 - square * sin * (1 / (n * (n + 1)))
    sin *= half
    return 1 - 2 * sin * sin, 2 * sin * cos


@triton.jit
def turned(a, b, positions, t, T, tokens, LOG_THETA: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr,
           BACK: tl.constexpr):  # fmt: skip
    """Returns the halves turned by the angles of the tokens, or back.

    The angle is float64 until whole turns are taken off: in float32 it would be off by 0.004 at position 100000."""
    position = tl.load(positions + (t % T if SHARED else t), mask=t < tokens, other=0).to(tl.float64)
    channel = tl.arange(0, a.shape[1]).to(tl.float64)
    frequency = tl.exp(channel * tl.full(channel.shape, -LOG_THETA / (K // 2), tl.float64))
    turns = position[:, None] * (frequency * tl.full(channel.shape, 1 / (2 * 3.141592653589793), tl.float64))[None, :]
    cos, sin = cos_and_sin((turns - tl.floor(turns + 0.5)).to(tl.float32))
    if BACK:
        sin = -sin
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def total(a, b):
    """Returns the sums over the channels of both halves, [C, 1]."""
    return (tl.sum(a, 1) + tl.sum(b, 1))[:, None]


@triton.jit(do_not_specialize=["T", "tokens"])
def qk_norm(
    x, positions, y, T, tokens, stride, EPS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, NORM: tl.constexpr, LOG_THETA: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of tokens, heads). Writes y."""
    t, at, into, first, second = place(tokens, stride, HEADS, K, C, BH)
    a, b = halves(x, at, first, second, K)
    if NORM == "l2":
        factor = tl.rsqrt(total(a * a, b * b) + EPS)
        a, b = a * factor, b * factor
    elif NORM == "sum":
        factor = 1 / (total(a, b) + EPS)
        a, b = a * factor, b * factor
    if positions is not None:
        a, b = turned(a, b, positions, t, T, tokens, LOG_THETA, K, SHARED, False)
    store_halves(y, a, b, into, first, second, K)


@triton.jit(do_not_specialize=["T", "tokens"])
def qk_norm_back(
    x, positions, d_y, d_x, T, tokens, stride, EPS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, BH: tl.constexpr, NORM: tl.constexpr, LOG_THETA: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of tokens, heads). Writes d_x."""
    t, at, into, first, second = place(tokens, stride, HEADS, K, C, BH)
    a, b = halves(d_y, into, first, second, K)
    if positions is not None:
        a, b = turned(a, b, positions, t, T, tokens, LOG_THETA, K, SHARED, True)
    if NORM != "none":
        xa, xb = halves(x, at, first, second, K)
        along = total(a * xa, b * xb)
        if NORM == "l2":
            factor = tl.rsqrt(total(xa * xa, xb * xb) + EPS)
            along *= factor * factor
            a, b = factor * (a - along * xa), factor * (b - along * xb)
        else:
            factor = 1 / (total(xa, xb) + EPS)
            a, b = factor * (a - along * factor), factor * (b - along * factor)
    store_halves(d_x, a, b, into, first, second, K)


def forward(call: QKNorm) -> Tensor:
    given, common, grid = _launch(call)
    y = call.result()
    with torch.cuda.device_of(y):
        qk_norm[grid](**given, y=y, **common)
    return y


def backward(d_y: Tensor, call: QKNorm) -> list[Tensor | None]:
    given, common, grid = _launch(call)
    d_x = call.result()
    with torch.cuda.device_of(d_y):
        qk_norm_back[grid](**given, d_y=d_y.contiguous(), d_x=d_x, **common)
    return [d_x, None]


def _launch(call: QKNorm) -> tuple[dict[str, Tensor | None], dict[str, Any], tuple[int, int]]:
    """Returns what both ways read, the arguments of both kernels, and the grid."""
    (B, T, heads, K), x, positions = call.x.shape, one_stride(call.x), call.positions
    assert x is not None
    BH = triton.next_power_of_2((K + 1) // 2)
    C = max(SIZE // BH, 1)
    given = {"x": x, "positions": positions if positions is None else positions.contiguous()}
    common = {
        "T": T, "tokens": B * T, "stride": x.stride(1), "EPS": EPS, "HEADS": heads, "K": K, "C": C, "BH": BH,
        "NORM": call.norm, "LOG_THETA": math.log(call.theta), "SHARED": positions is not None and len(positions) == 1,
        "num_warps": 4,
    }  # fmt: skip
    return given, common, (-(-B * T // C), heads)
