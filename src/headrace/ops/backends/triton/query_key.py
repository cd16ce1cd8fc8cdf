"""The gates of head competition, the norm of q or k over its channels, and the rotary embedding: y = rotary(norm(x)).

x, y [tokens, HQ, K], positions [tokens], or [T] for all rows of the batch, weight [H, K], gates [tokens, H]. Channel i
is turned with channel i + half by the angle position · theta^(−i / half). A program holds G heads of x, all HQ of them
if there are gates, in a block [C, BG, BH] for each half of the channels; R = H / HQ gates share a head of x.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...query_key import EPS, QueryKey
from .competition import level, log_gates, slopes
from .launch import one_stride, strides

SIZE = 2048  # entries of each half that a program holds, if one token has no more
PARTS = 8  # blocks of tokens per program of the backward with gates, so that few sums are left to add up


@triton.jit
def place(first, tokens, stride, HQ: tl.constexpr, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
          BG: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Returns the tokens from the first [C], the offsets of their first halves into x and into y, and the masks of both
    halves, [C, BG, BH]."""
    t, g, i = first + tl.arange(0, C), tl.arange(0, BG), tl.arange(0, BH)[None, None, :]
    known = (t < tokens)[:, None, None] & (g < G)[None, :, None]
    token, head = t[:, None, None], (tl.program_id(1) * G + g)[None, :, None]
    half: tl.constexpr = (K + 1) // 2
    at, into = token * stride + head * K + i, (token * HQ + head) * K + i
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
    channel = tl.arange(0, a.shape[2]).to(tl.float64)
    frequency = tl.exp(channel * tl.full(channel.shape, -LOG_THETA / (K // 2), tl.float64))
    turns = position[:, None] * (frequency * tl.full(channel.shape, 1 / (2 * 3.141592653589793), tl.float64))[None, :]
    cos, sin = cos_and_sin((turns - tl.floor(turns + 0.5)).to(tl.float32))
    cos, sin = cos[:, None, :], (-sin if BACK else sin)[:, None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def total(a, b):
    """Returns the sums over the channels of both halves, [C, BG, 1]."""
    return (tl.sum(a, 2) + tl.sum(b, 2))[:, :, None]


@triton.jit
def weights(weight, HQ: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr,
            BH: tl.constexpr):  # fmt: skip
    """Returns the offsets of the first halves of the weights, and the masks of both halves, [BG, BR, BH]."""
    g, r, i = tl.arange(0, BG)[:, None, None], tl.arange(0, BR)[None, :, None], tl.arange(0, BH)[None, None, :]
    half: tl.constexpr = (K + 1) // 2
    real = (g < HQ) & (r < R)
    return (g * R + r) * K + i, real & (i < half), real & (i < K - half)


@triton.jit
def heads(HQ: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr):
    """Returns (head, whether it exists) for each place in a block of heads, [BG · BR]."""
    place = tl.arange(0, BG * BR)
    return place // BR * R + place % BR, (place // BR < HQ) & (place % BR < R)


@triton.jit
def scores(a, b, wa, wb, temperature):
    """Returns ⟨x_h, w_h⟩ / temperature, [C, BG · BR]."""
    found = tl.sum(a[:, :, None, :] * wa[None, :, :, :], 3) + tl.sum(b[:, :, None, :] * wb[None, :, :, :], 3)
    return tl.reshape(found, (found.shape[0], found.shape[1] * found.shape[2])) / temperature


@triton.jit(do_not_specialize=["T", "tokens", "x_stride"])
def query_key(
    x, positions, weight, y, gates, T, tokens, x_stride, temperature, offset, EPS: tl.constexpr, HQ: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr,
    BH: tl.constexpr, NORM: tl.constexpr, LOG_THETA: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr,
    IDENTITY: tl.constexpr, LOG: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of C tokens, HQ / G). Writes y and the gates."""
    t, at, into, first, second = place(tl.program_id(0).to(tl.int64) * C, tokens, x_stride * ALIGN, HQ, G, K, C, BG, BH)
    a, b = halves(x, at, first, second, K)
    if weight is not None:
        where, w_first, w_second = weights(weight, HQ, R, K, BG, BR, BH)
        wa, wb = halves(weight, where, w_first, w_second, K)
        head, real = heads(HQ, R, BG, BR)
        found = log_gates(scores(a, b, wa, wb, temperature), real, offset, KIND) - level(real, offset, KIND, IDENTITY)
        if not LOG:
            found = tl.exp(found)
        known = (t < tokens)[:, None] & real[None, :]
        tl.store(gates + t[:, None] * (HQ * R) + head[None, :], found, mask=known)
    if y is not None:
        if NORM == "l2":
            factor = tl.rsqrt(total(a * a, b * b) + EPS)
            a, b = a * factor, b * factor
        elif NORM == "sum":
            factor = 1 / (total(a, b) + EPS)
            a, b = a * factor, b * factor
        if positions is not None:
            a, b = turned(a, b, positions, t, T, tokens, LOG_THETA, K, SHARED, False)
        store_halves(y, a, b, into, first, second, K)


@triton.jit(do_not_specialize=["T", "tokens", "x_stride"])
def query_key_back(
    x, positions, weight, d_y, d_gates, d_x, d_weight, T, tokens, x_stride, temperature, offset, EPS: tl.constexpr,
    HQ: tl.constexpr, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BG: tl.constexpr,
    BR: tl.constexpr, BH: tl.constexpr, NORM: tl.constexpr, LOG_THETA: tl.constexpr, SHARED: tl.constexpr,
    KIND: tl.constexpr, IDENTITY: tl.constexpr, LOG: tl.constexpr, ALIGN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of PARTS blocks of C tokens, HQ / G). Writes d_x, and d_weight [groups, H, K] of each group's
    tokens."""
    group = tl.program_id(0).to(tl.int64)
    if d_gates is not None:
        where, w_first, w_second = weights(weight, HQ, R, K, BG, BR, BH)
        wa, wb = halves(weight, where, w_first, w_second, K)
        sum_a = tl.zeros((BG, BR, BH), tl.float32)
        sum_b = tl.zeros((BG, BR, BH), tl.float32)
        head, real = heads(HQ, R, BG, BR)
    for part in range(PARTS):
        t, at, into, first, second = place((group * PARTS + part) * C, tokens, x_stride * ALIGN, HQ, G, K, C, BG, BH)
        xa, xb = halves(x, at, first, second, K)
        a = tl.zeros((C, BG, BH), tl.float32)
        b = tl.zeros((C, BG, BH), tl.float32)
        if d_y is not None:
            a, b = halves(d_y, into, first, second, K)
            if positions is not None:
                a, b = turned(a, b, positions, t, T, tokens, LOG_THETA, K, SHARED, True)
            if NORM == "l2":
                factor = tl.rsqrt(total(xa * xa, xb * xb) + EPS)
                along = total(a * xa, b * xb) * factor * factor
                a, b = factor * (a - along * xa), factor * (b - along * xb)
            elif NORM == "sum":
                factor = 1 / (total(xa, xb) + EPS)
                along = total(a * xa, b * xb) * factor
                a, b = factor * (a - along), factor * (b - along)
        if d_gates is not None:
            known = (t < tokens)[:, None] & real[None, :]
            d = tl.load(d_gates + t[:, None] * (HQ * R) + head[None, :], mask=known, other=0.0)
            d = slopes(scores(xa, xb, wa, wb, temperature), d, real, offset, KIND, IDENTITY, LOG) / temperature
            d = tl.reshape(d, (C, BG, BR))[:, :, :, None]
            a += tl.sum(d * wa[None, :, :, :], 2)
            b += tl.sum(d * wb[None, :, :, :], 2)
            sum_a += tl.sum(d * xa[:, :, None, :], 0)
            sum_b += tl.sum(d * xb[:, :, None, :], 0)
        store_halves(d_x, a, b, into, first, second, K)
    if d_gates is not None:
        store_halves(d_weight + group * (HQ * R * K), sum_a, sum_b, where, w_first, w_second, K)


def forward(call: QueryKey) -> tuple[Tensor | None, Tensor | None]:
    given, common, columns = _launch(call, call.weight)
    y, gates = found = call.results()
    with torch.cuda.device_of(call.x):
        query_key[(-(-common["tokens"] // common["C"]), columns)](**given, y=y, gates=gates, **common)
    return found


def backward(d_y: Tensor | None, d_gates: Tensor | None, call: QueryKey) -> list[Tensor | None]:
    weight = None if d_gates is None else call.weight
    given, common, columns = _launch(call, weight)
    parts = 1 if weight is None else PARTS
    groups = -(-common["tokens"] // (common["C"] * parts))
    d_x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    d_weight = None if weight is None else call.x.new_empty(groups, *weight.shape, dtype=torch.float32)
    incoming = {name: d if d is None else d.contiguous() for name, d in {"d_y": d_y, "d_gates": d_gates}.items()}
    with torch.cuda.device_of(call.x):
        query_key_back[(groups, columns)](**given, **incoming, d_x=d_x, d_weight=d_weight, **common, PARTS=parts)
    if d_weight is None:
        return [d_x, None, None if call.weight is None else torch.zeros_like(call.weight)]
    return [d_x, None, d_weight.sum(0)]


def _launch(call: QueryKey, weight: Tensor | None) -> tuple[dict[str, Tensor | None], dict[str, Any], int]:
    """Returns what both ways read, the arguments of both kernels, and the columns of the grid."""
    (B, T, HQ, K), x, positions = call.x.shape, one_stride(call.x), call.positions
    assert x is not None
    R = 1 if weight is None else len(weight) // HQ
    BR, BH = triton.next_power_of_2(R), triton.next_power_of_2((K + 1) // 2)
    G = HQ if weight is not None or triton.next_power_of_2(HQ) * BH <= SIZE else 1
    BG = triton.next_power_of_2(G)
    token = BG * BR * BH  # entries of each half
    given = {
        "x": x, "positions": positions if positions is None else positions.contiguous(),
        "weight": weight if weight is None else weight.contiguous(),
    }  # fmt: skip
    common = {
        "T": T, "tokens": B * T, **strides(x=x), "temperature": call.temperature, "offset": call.offset,
        "EPS": EPS, "HQ": HQ, "G": G, "R": R, "K": K, "C": max(SIZE // token, 1), "BG": BG, "BR": BR, "BH": BH,
        "NORM": call.norm, "LOG_THETA": math.log(call.theta),
        "SHARED": positions is not None and len(positions) == 1, "KIND": call.kind, "IDENTITY": call.identity,
        "LOG": call.log, "num_warps": min((4 if weight is None else 8) * max(token // SIZE, 1), 16),
    }  # fmt: skip
    return given, common, HQ // G
