"""The decays of a layer, y = −rate · exp(log_rate) · f(x + bias), with f = softplus or exp, log σ(x) = −softplus(−x);
and its write strengths, y = σ(x).

x, y [tokens, N], bias [N], log_rate [H], N channels of all heads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...control import Control
from .launch import one_stride, strides

BLOCK, CHANNELS = 2048, 128  # numbers of a tensor that a program holds at a time, and at most so many of a token
PARTS = 16  # blocks of tokens per program of the backward, so that few sums are left to add up


@triton.jit
def softplus(x):
    """Precise also where it is small: log(1 + e) = 2 artanh(e / (2 + e)), of which e ≤ 1 needs eight terms."""
    e = tl.exp(-tl.abs(x))
    ratio = e / (2 + e)
    square = ratio * ratio
    series = tl.full(x.shape, 1 / 15, tl.float32)
    for n in tl.static_range(13, 0, -2):
        series = series * square + 1 / n
    return tl.maximum(x, 0.0) + 2 * ratio * series


@triton.jit
def place(first, tokens, channels, stride, N: tl.constexpr, BT: tl.constexpr):
    """Returns (the mask, offsets into x, offsets into y) of the tokens from the first on, [BT, BN] each."""
    t = (first + tl.arange(0, BT))[:, None]
    return (t < tokens) & (channels < N), t * stride + channels, t * N + channels


@triton.jit
def per_channel(x, index, inside):
    return tl.load(x + index, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def decayed(x, bias, factor, channels, at, inside, KIND: tl.constexpr, N: tl.constexpr):
    """Returns (y, its derivative to x)."""
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += per_channel(bias, channels, channels < N)
    if KIND == "beta":
        y = tl.sigmoid(z)
        return y, y * (1 - y)
    if KIND == "exp":
        y = -factor * tl.exp(z)
        return y, y
    if KIND == "sigmoid":
        return -factor * softplus(-z), factor * tl.sigmoid(-z)
    return -factor * softplus(z), -factor * tl.sigmoid(z)


@triton.jit
def factor_of(log_rate, rate, channels, N: tl.constexpr, K: tl.constexpr):
    """Returns rate · exp(log_rate) [1, BN]."""
    factor = tl.full(channels.shape, 1.0, tl.float32) * rate
    return factor if log_rate is None else factor * tl.exp(per_channel(log_rate, channels // K, channels < N))


@triton.jit(do_not_specialize=["tokens", "x_stride"])
def control(
    x, bias, log_rate, y, tokens, x_stride, rate,
    N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of tokens, blocks of channels). Writes y."""
    channels = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    inside, at, into = place(tl.program_id(0).to(tl.int64) * BT, tokens, channels, x_stride * ALIGN, N, BT)
    found, _ = decayed(x, bias, factor_of(log_rate, rate, channels, N, K), channels, at, inside, KIND, N)
    tl.store(y + into, found, mask=inside)


@triton.jit(do_not_specialize=["tokens", "x_stride"])
def control_back(
    x, bias, log_rate, d_y, d_x, d_bias, d_log_rate, tokens, x_stride, rate,
    N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, ALIGN: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of PARTS blocks of tokens, blocks of channels). Writes d_x, and of each group's tokens d_bias and
    d_log_rate [groups, N]."""
    channels = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    factor = factor_of(log_rate, rate, channels, N, K)
    sum_bias = tl.zeros(channels.shape, tl.float32)
    sum_rate = tl.zeros(channels.shape, tl.float32)
    for part in range(PARTS):
        first = (tl.program_id(0).to(tl.int64) * PARTS + part) * BT
        inside, at, into = place(first, tokens, channels, x_stride * ALIGN, N, BT)
        y, slope = decayed(x, bias, factor, channels, at, inside, KIND, N)
        d = tl.load(d_y + into, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + into, (d * slope).to(d_x.dtype.element_ty), mask=inside)
        sum_bias += tl.sum(d * slope, 0)[None, :]
        sum_rate += tl.sum(d * y, 0)[None, :]
    sums = tl.program_id(0).to(tl.int64) * N + channels
    if bias is not None:
        tl.store(d_bias + sums, sum_bias, mask=channels < N)
    if log_rate is not None:
        tl.store(d_log_rate + sums, sum_rate, mask=channels < N)


def forward(call: Control) -> tuple[Tensor]:
    given, common, (tokens, columns) = _launch(call)
    (y,) = found = call.results()
    with torch.cuda.device_of(y):
        control[(-(-tokens // common["BT"]), columns)](**given, y=y, **common)
    return found


def backward(d_y: Tensor, call: Control) -> list[Tensor | None]:
    given, common, (tokens, columns) = _launch(call)
    groups = -(-tokens // (common["BT"] * PARTS))
    d_x = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    d_bias, d_log_rate = (
        x if x is None else d_y.new_empty(groups, common["N"], dtype=torch.float32) for x in (call.bias, call.log_rate)
    )
    with torch.cuda.device_of(d_y):
        control_back[(groups, columns)](
            **given, d_y=d_y.contiguous(), d_x=d_x, d_bias=d_bias, d_log_rate=d_log_rate, **common, PARTS=PARTS
        )
    if d_log_rate is not None:
        d_log_rate = d_log_rate.sum(0).view(-1, common["K"]).sum(1)
    return [d_x, d_bias if d_bias is None else d_bias.sum(0), d_log_rate]


def _launch(call: Control) -> tuple[dict[str, Tensor | None], dict[str, Any], tuple[int, int]]:
    """Returns what both ways read, the arguments of both kernels, and (tokens, blocks of channels)."""
    (B, T, H), x = call.x.shape[:3], one_stride(call.x.flatten(2)[:, :, None])
    assert x is not None
    N = x.shape[2]
    BN = min(CHANNELS, triton.next_power_of_2(N))
    given = {"x": x, "bias": one_stride(call.bias), "log_rate": one_stride(call.log_rate)}
    common = {
        "tokens": B * T, **strides(x=x), "rate": call.rate, "N": N, "K": N // H, "BT": BLOCK // BN, "BN": BN,
        "KIND": call.kind, "num_warps": 4,
    }  # fmt: skip
    return given, common, (B * T, -(-N // BN))
