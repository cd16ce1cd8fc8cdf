"""The log gate of head competition: a softmax over the heads of s_h = ⟨x_h, w_h⟩ / temperature, or a sigmoid of
s_h − offset; with IDENTITY less its level, the log gate of zero scores.

x [tokens, HQ, K], weight [H, K], log_gate [tokens, H]. A program holds all heads: BG heads of x with BR heads each that
share it, of which HQ and R exist.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..competition import Activation
from .launch import one_stride

SIZE = 4096  # entries of x that a program holds at a time
TOKENS = 32  # of a program of the backward, which writes one share of the gradient to the weights


@triton.jit
def places(HQ: tl.constexpr, R: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr):
    """Returns (head of x, head, whether they exist) for each place in a block of heads, [BG · BR]."""
    place = tl.arange(0, BG * BR)
    group, share = place // BR, place % BR
    return group, group * R + share, (group < HQ) & (share < R)


@triton.jit
def entries(x, rows, columns, known, keys, K: tl.constexpr):
    """Loads x [rows, columns, K] in float32. rows: where each begins in memory; known: [rows, columns]."""
    at = rows[:, None, None] + columns[None, :, None] * K + keys[None, None, :]
    return tl.load(x + at, mask=known[:, :, None] & (keys < K)[None, None, :], other=0.0).to(tl.float32)


@triton.jit
def activated(s, real, offset, KIND: tl.constexpr):
    """Returns the log gates of scores [C, heads]."""
    if KIND == "sigmoid":
        z = s - offset
        found = tl.minimum(z, 0.0) - tl.log(1 + tl.exp(-tl.abs(z)))
    else:
        s = tl.where(real[None, :], s, -float("inf"))
        top = tl.max(s, 1)
        if KIND == "null":
            top = tl.maximum(top, 0.0)
        total = tl.sum(tl.exp(s - top[:, None]), 1)
        if KIND == "null":
            total += tl.exp(-top)
        found = s - top[:, None] - tl.log(total)[:, None]
    return found


@triton.jit
def level(real, offset, KIND: tl.constexpr):
    """Returns the log gates of zero scores [1, heads], computed as others are: log H may differ in its last bit."""
    return activated(tl.zeros((1, real.shape[0]), tl.float32), real, offset, KIND)


@triton.jit
def slope(log_gate, d_log_gate, KIND: tl.constexpr):
    """Returns the gradient to scores [C, heads], from the log gate without its level taken off."""
    if KIND == "sigmoid":
        found = d_log_gate * (1 - tl.exp(log_gate))
    else:
        found = d_log_gate - tl.exp(log_gate) * tl.sum(d_log_gate, 1)[:, None]
    return found


@triton.jit(do_not_specialize=["T"])
def compete(
    x, weight, log_gate, T, stride, temperature, offset, HQ: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, IDENTITY: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of C tokens). Writes log_gate."""
    t = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    group, head, real = places(HQ, R, BG, BR)
    known = (t < T)[:, None] & real[None, :]
    products = tl.zeros((C, BG * BR, BK), tl.float32)
    for first in range(0, K, BK):
        keys = first + tl.arange(0, BK)
        w = entries(weight, tl.arange(0, 1), head, real[None, :], keys, K)
        products += entries(x, t * stride, group, known, keys, K) * w
    found = activated(tl.sum(products, 2) / temperature, real, offset, KIND)
    if IDENTITY:
        found -= level(real, offset, KIND)
    tl.store(log_gate + t[:, None] * (HQ * R) + head[None, :], found, mask=known)


@triton.jit(do_not_specialize=["T"])
def slopes(
    x, weight, log_gate, d_log_gate, d_x, d_weight, T, stride, temperature, offset, HQ: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, BG: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    IDENTITY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of TOKENS tokens, blocks of K). Writes d_x, and d_weight [blocks, H, K] of each block's tokens."""
    block = tl.program_id(0).to(tl.int64)
    keys = tl.program_id(1) * BK + tl.arange(0, BK)
    group, head, real = places(HQ, R, BG, BR)
    w = entries(weight, tl.arange(0, 1), head, real[None, :], keys, K)
    products = tl.zeros((C, BG * BR, BK), tl.float32)
    for first in range(0, TOKENS, C):
        t = block * TOKENS + first + tl.arange(0, C)
        known, at = (t < T)[:, None] & real[None, :], t[:, None] * (HQ * R) + head[None, :]
        gate = tl.load(log_gate + at, mask=known, other=-float("inf"))
        if IDENTITY:
            gate += level(real, offset, KIND)
        d = slope(gate, tl.load(d_log_gate + at, mask=known, other=0.0), KIND) / temperature
        products += d[:, :, None] * entries(x, t * stride, group, known, keys, K)
        groups = tl.arange(0, BG)
        d_heads = tl.sum(tl.reshape(d[:, :, None] * w, (C, BG, BR, BK)), 2)
        heads = d_x + t[:, None, None] * (HQ * K) + groups[None, :, None] * K + keys[None, None, :]
        mask = (t < T)[:, None, None] & (groups < HQ)[None, :, None] & (keys < K)[None, None, :]
        tl.store(heads, d_heads.to(d_x.dtype.element_ty), mask=mask)
    into = d_weight + block * (HQ * R * K) + head[:, None] * K + keys[None, :]
    tl.store(into, tl.sum(products, 0), mask=real[:, None] & (keys < K)[None, :])


def forward(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    given, common = _launch(x, weight, activation)
    log_gate = x.new_empty(*x.shape[:2], len(weight), dtype=torch.float32)
    with torch.cuda.device_of(x):
        compete[(-(-common["T"] // common["C"]),)](**given, log_gate=log_gate, **common)
    return log_gate


def backward(
    d_log_gate: Tensor, log_gate: Tensor, x: Tensor, weight: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    given, common = _launch(x, weight, activation)
    d_x, blocks = torch.empty_like(x, memory_format=torch.contiguous_format), -(-common["T"] // TOKENS)
    d_weight = log_gate.new_empty(blocks, *weight.shape)
    with torch.cuda.device_of(x):
        slopes[(blocks, -(-common["K"] // common["BK"]))](
            **given, log_gate=log_gate, d_log_gate=d_log_gate.contiguous(), d_x=d_x, d_weight=d_weight, TOKENS=TOKENS,
            **common,
        )  # fmt: skip
    return d_x, d_weight.sum(0)


def _launch(x: Tensor, weight: Tensor, activation: Activation) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what both ways read, and the arguments of both kernels."""
    B, T, HQ, K = x.shape
    given: dict[str, Any] = {"x": one_stride(x), "weight": weight.contiguous()}
    R = len(weight) // HQ
    BG, BR = triton.next_power_of_2(HQ), triton.next_power_of_2(R)
    BK = min(triton.next_power_of_2(K), SIZE // (BG * BR))
    common = {
        "T": B * T, "stride": given["x"].stride(1), "temperature": activation.temperature,
        "offset": activation.offset, "HQ": HQ, "R": R, "K": K, "C": min(TOKENS, SIZE // (BG * BR * BK)), "BG": BG,
        "BR": BR, "BK": BK, "KIND": activation.kind, "IDENTITY": activation.identity, "num_warps": 4,
    }  # fmt: skip
    return given, common
