"""The gated norm: y = norm(x) · strength · gate(logits), or norm(x · gate(logits)), in one pass each way.

x, logits, y [tokens, H, V], strength [tokens, H], weight and bias [H or 1, V]. A joint norm has one head here.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...gated_norm import GatedNorm
from .launch import one_stride, strides

BLOCK = 4096  # numbers of a tensor that a program holds at a time
ORDERS = {"FIRST": "gate-norm", "LAST": "norm-gate"}  # places of the gate
PARTS = 8  # blocks of tokens per program of the backward, so that few sums are left to add up


@triton.jit
def place(first, tokens, H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Returns (tokens [BT], channels [BV], the mask of both, offsets into [tokens, H, V]) from the first token."""
    t, channels = first + tl.arange(0, BT), tl.arange(0, BV)
    inside = (t < tokens)[:, None] & (channels < V)[None, :]
    return t, channels, inside, (t[:, None] * H + tl.program_id(1)) * V + channels[None, :]


@triton.jit
def load(x, at, inside):
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def row(x, channels, V: tl.constexpr, SHARED: tl.constexpr):
    """Loads the weights or biases of the program's head, [1, BV]."""
    head = 0 if SHARED else tl.program_id(1)
    return tl.load(x + head * V + channels, mask=channels < V, other=0.0).to(tl.float32)[None, :]


@triton.jit
def opened(z, GATE: tl.constexpr):
    """Returns (gate(z), its derivative)."""
    share = tl.sigmoid(z)
    if GATE == "silu":
        return z * share, share * (1 + z * (1 - share))
    return share, share * (1 - share)


@triton.jit
def centred(x, inside, V: tl.constexpr):
    return tl.where(inside, x - tl.sum(x, 1)[:, None] / V, 0.0)


@triton.jit
def normed(x, inside, eps, V: tl.constexpr, NORM: tl.constexpr):
    """Returns (x̂, the factor of the norm [BT, 1])."""
    if NORM == "none":
        return x, tl.full((x.shape[0], 1), 1.0, tl.float32)
    if NORM == "group":
        x = centred(x, inside, V)
    factor = tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
    return x * factor, factor


@triton.jit(do_not_specialize=["tokens", "logits_stride"])
def gated_norm(
    x, logits, strength, weight, bias, y, tokens, logits_stride, eps,
    H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, SHARED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of tokens, H). Writes y."""
    t, channels, inside, at = place(tl.program_id(0).to(tl.int64) * BT, tokens, H, V, BT, BV)
    found = load(x, at, inside)
    if FIRST or LAST:
        stride = logits_stride * ALIGN
        gate, _ = opened(load(logits, t[:, None] * stride + tl.program_id(1) * V + channels[None, :], inside), GATE)
    if FIRST:
        found *= gate
    found, _ = normed(found, inside, eps, V, NORM)
    if weight is not None:
        found *= row(weight, channels, V, SHARED)
    if bias is not None:
        found += row(bias, channels, V, SHARED)
    if strength is not None:
        found *= load(strength, t * H + tl.program_id(1), t < tokens)[:, None]
    if LAST:
        found *= gate
    tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "logits_stride"])
def gated_norm_back(
    x, logits, strength, weight, bias, d_y, d_x, d_logits, d_strength, d_weight, d_bias, tokens, logits_stride, eps,
    H: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, SHARED: tl.constexpr, ALIGN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of PARTS blocks of tokens, H). Writes the gradients, d_weight and d_bias [groups, H, V] of each
    group's tokens."""
    sum_weight = tl.zeros((1, BV), tl.float32)
    sum_bias = tl.zeros((1, BV), tl.float32)
    stride = logits_stride * ALIGN
    for part in range(PARTS):
        first = (tl.program_id(0).to(tl.int64) * PARTS + part) * BT
        t, channels, inside, at = place(first, tokens, H, V, BT, BV)
        slope, source = load(d_y, at, inside), load(x, at, inside)
        unit = source
        if FIRST or LAST:
            z = load(logits, t[:, None] * stride + tl.program_id(1) * V + channels[None, :], inside)
            gate, gate_slope = opened(z, GATE)
        if FIRST:
            unit *= gate
        unit, factor = normed(unit, inside, eps, V, NORM)
        result = unit  # of norm, weight and bias
        if weight is not None:
            result *= row(weight, channels, V, SHARED)
        if bias is not None:
            result += row(bias, channels, V, SHARED)
        if strength is not None:
            each = load(strength, t * H + tl.program_id(1), t < tokens)[:, None]
        if LAST:
            d_gate = slope * result
            if strength is not None:
                d_gate *= each
            tl.store(d_logits + at, (d_gate * gate_slope).to(d_logits.dtype.element_ty), mask=inside)
            slope *= gate
        if strength is not None:
            tl.store(d_strength + t * H + tl.program_id(1), tl.sum(slope * result, 1), mask=t < tokens)
            slope *= each
        if bias is not None:
            sum_bias += tl.sum(slope, 0)[None, :]
        if weight is not None:
            sum_weight += tl.sum(slope * unit, 0)[None, :]
            slope *= row(weight, channels, V, SHARED)
        if NORM != "none":
            if NORM == "group":
                slope = centred(slope, inside, V)
            slope = factor * (slope - unit * (tl.sum(slope * unit, 1)[:, None] / V))
        if FIRST:
            tl.store(d_logits + at, (slope * source * gate_slope).to(d_logits.dtype.element_ty), mask=inside)
            slope *= gate
        tl.store(d_x + at, slope.to(d_x.dtype.element_ty), mask=inside)
    channels = tl.arange(0, BV)[None, :]
    into = (tl.program_id(0).to(tl.int64) * H + tl.program_id(1)) * V + channels
    if weight is not None:
        tl.store(d_weight + into, sum_weight, mask=channels < V)
    if bias is not None:
        tl.store(d_bias + into, sum_bias, mask=channels < V)


def forward(call: GatedNorm) -> tuple[Tensor]:
    given, common, (tokens, block, H) = _launch(call)
    (y,) = found = call.results()
    with torch.cuda.device_of(y):
        gated_norm[(-(-tokens // block), H)](**given, y=y, **common)
    return found


def backward(d_y: Tensor, call: GatedNorm) -> list[Tensor | None]:
    given, common, (tokens, block, H) = _launch(call)
    groups = -(-tokens // (block * PARTS))

    def new(like: Tensor | None, *shape: int) -> Tensor | None:
        if like is None:
            return None
        return d_y.new_empty(shape or like.shape, dtype=torch.float32 if shape else like.dtype)

    sums = groups, H, common["V"]
    found = {
        "d_x": new(call.x), "d_logits": new(call.logits), "d_strength": new(call.strength, *call.x.shape[:3]),
        "d_weight": new(call.weight, *sums), "d_bias": new(call.bias, *sums),
    }  # fmt: skip
    with torch.cuda.device_of(d_y):
        gated_norm_back[(groups, H)](**given, d_y=d_y.contiguous(), **found, **common, PARTS=PARTS)
    dims = (0, 1) if common["SHARED"] else (0,)
    *whole, d_weight, d_bias = found.values()
    return [*whole, *(x if x is None else x.sum(dims).flatten() for x in (d_weight, d_bias))]


def _launch(call: GatedNorm) -> tuple[dict[str, Tensor | None], dict[str, Any], tuple[int, int, int]]:
    """Returns what both ways read, the arguments of both kernels, and (tokens, tokens per block, heads)."""
    x, logits, (B, T, H, V) = call.x.contiguous(), one_stride(call.logits), call.x.shape
    given = {
        "x": x, "logits": logits, "strength": call.strength, "weight": call.weight, "bias": call.bias,
    }  # fmt: skip
    given |= {name: y if y is None else y.contiguous() for name, y in given.items() if name not in ("x", "logits")}
    if call.norm == "rms-joint":
        H, V = 1, H * V
    BV = triton.next_power_of_2(V)
    BT = max(1, BLOCK // BV)
    common = {
        "tokens": B * T, **strides(logits=logits), "eps": call.eps, "H": H, "V": V,
        "BT": BT, "BV": BV, "NORM": "none" if call.weight is None else call.norm, "GATE": call.gate,
        **{place: logits is not None and call.order == order for place, order in ORDERS.items()},
        "SHARED": call.norm == "rms", "num_warps": 8 if BV > 2048 else 4,
    }  # fmt: skip
    return given, common, (B * T, BT, H)
