"""One token of a linear layer in three launches, from the output of its input projection to the input of its output
projection, with the state updated in place: the short convolution, if any, the step, and the gated norm.

The step computes what `query_key`, `control` and `step_kernel` compute of many tokens. Each of its programs needs the
scores of all heads, and computes them itself.

Dimensions: B batch, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...gated_norm import GatedNorm
from ...query_key import EPS as NORM_EPS
from .block_sizes import block
from .competition import level, log_gates
from .control import decayed, softplus
from .gated_norm import forward as gated_norm
from .layer import Layer
from .limits import LARGEST_KEY
from .query_key import cos_and_sin
from .step import PROGRAM, advanced

CHANNELS = 256  # of a program of the convolution


@triton.jit
def convolve_token(x, weight, bias, history, y, stride, D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr):
    """Grid: (B, blocks of D). Writes y [B, D] of x [B, D], and moves history [B, W − 1, D] on by a token."""
    b, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    known, first = d < D, history + b * (W - 1) * D + d
    now = tl.load(x + b * stride + d, mask=known, other=0.0)
    z = now.to(tl.float32) * tl.load(weight + d * W + W - 1, mask=known, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + d, mask=known, other=0.0).to(tl.float32)
    for i in tl.static_range(W - 1):
        before = tl.load(first + i * D, mask=known, other=0.0)
        z += before.to(tl.float32) * tl.load(weight + d * W + i, mask=known, other=0.0).to(tl.float32)
        if i > 0:
            tl.debug_barrier()  # another thread may hold a copy of the channels, and load after this one has stored
            tl.store(first + (i - 1) * D, before, mask=known)
    if W > 1:
        tl.debug_barrier()
        tl.store(first + (W - 2) * D, now, mask=known)
    tl.store(y + b * D + d, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=known)


@triton.jit
def mapped(x, at, inside, MAP: tl.constexpr):
    """Loads the features of a q or k."""
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if MAP == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif MAP == "silu":
        z = z * tl.sigmoid(z)
    elif MAP == "elu+1":
        small = tl.exp(tl.minimum(z, 0.0, propagate_nan=tl.PropagateNan.ALL))
        z = tl.where(inside, tl.where(z > 0, z + 1, small), 0.0)
    return z


@triton.jit
def features(x, keys, position, EPS: tl.constexpr, K: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr,
             LOG_THETA: tl.constexpr):  # fmt: skip
    """Returns q or k [BK] of one head as the recurrence takes it. position: None without rotary embedding, whose angle
    is float64 as in query_key.py."""
    a = mapped(x, keys, keys < K, MAP)
    factor = 1.0
    if NORM == "l2":
        factor = tl.rsqrt(tl.sum(a * a, 0) + EPS)
    if position is not None:
        half: tl.constexpr = K // 2
        is_first = keys < half
        other = mapped(x, tl.where(is_first, keys + half, keys - half), keys < K, MAP)
        channel = (keys % half).to(tl.float64)
        frequency = tl.exp(channel * tl.full(channel.shape, -LOG_THETA / half, tl.float64))
        turns = tl.load(position).to(tl.float64) * frequency
        turns *= tl.full(channel.shape, 1 / (2 * 3.141592653589793), tl.float64)
        cos, sin = cos_and_sin((turns - tl.floor(turns + 0.5)).to(tl.float32))
        a = a * cos + tl.where(is_first, -other, other) * sin
    return a * factor


@triton.jit
def log_gate(x, weight, h, keys, temperature, H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, BH: tl.constexpr,
             KIND: tl.constexpr, IDENTITY: tl.constexpr):  # fmt: skip
    """Returns the log gate of head h from q or k of all heads."""
    heads = tl.arange(0, BH)
    real, known = heads < H, (heads < H)[:, None] & (keys < K)[None, :]
    xs = tl.load(x + (heads // (H // HQ))[:, None] * K + keys[None, :], mask=known, other=0.0).to(tl.float32)
    ws = tl.load(weight + heads[:, None] * K + keys[None, :], mask=known, other=0.0).to(tl.float32)
    s = (tl.sum(xs * ws, 1) / temperature)[None, :]
    found = log_gates(s, real, 0.0, KIND) - level(real, 0.0, KIND, IDENTITY)
    return tl.sum(tl.where((heads == h)[None, :], found, 0.0))


@triton.jit
def layer_kernel(
    qkv, decay_part, beta_part, decay_bias, decay_log, bonus, read_scores, write_scores, skip, tokens, state, out,
    strength, qkv_stride, decay_stride, beta_stride, scale, temperature, EPS: tl.constexpr, H: tl.constexpr,
    HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
    MAP: tl.constexpr, NORM: tl.constexpr, LOG_THETA: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr,
    BETA: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, KIND: tl.constexpr, IDENTITY: tl.constexpr,
):  # fmt: skip
    """Grid: (B × H, blocks of V). Writes out [B, H, V], state [B, H, K, V] in place, and strength [B, H], the read gate
    that follows the norm."""
    row = tl.program_id(0)
    b, h = (row // H).to(tl.int64), row % H
    keys, values = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    has_key, has_value = keys < K, values < V
    q, head = qkv + b * qkv_stride, h // (H // HQ)
    k, position = q + HQ * K, tokens
    if tokens is not None:
        position = tokens + b
    xq = features(q + head * K, keys, position, EPS, K, MAP, NORM, LOG_THETA) * scale
    xk = features(k + head * K, keys, position, EPS, K, MAP, NORM, LOG_THETA)
    v = tl.load(k + HQ * K + h * V + values, mask=has_value, other=0.0).to(tl.float32)
    write = 0.0
    if WRITE != "none":
        write = log_gate(k, write_scores, h, keys, temperature, H, HQ, K, BH, KIND, IDENTITY)
    target, beta = v, 1.0
    if WRITE == "value":
        target = v * tl.exp(write)
    if BETA == "sigmoid":
        z = tl.load(beta_part + b * beta_stride + h).to(tl.float32)
        beta = tl.sigmoid(z + write if WRITE == "beta" else z)
    one = tl.arange(0, 1)
    if DECAY == "none":
        decay = tl.full((1, 1), 1.0, tl.float32)
    elif DECAY == "retnet":
        decay = 1 - tl.exp2(-5.0 - (h + one).to(tl.float32))[:, None]
    else:
        channels = h * K + keys if DECAY != "softplus" else h + one
        inside = has_key if DECAY != "softplus" else one < 1
        factor = 1 / 16 if DECAY == "sigmoid" else 1.0
        if decay_log is not None:
            factor = tl.exp(tl.load(decay_log + h).to(tl.float32))
        FORM: tl.constexpr = "softplus" if DECAY == "softplus-vector" else DECAY
        found, _ = decayed(decay_part + b * decay_stride, decay_bias, factor, channels, channels, inside, FORM, H * K)
        decay = tl.exp(found)[:, None]
        if BETA == "dt":
            step_size = tl.load(decay_part + b * decay_stride + h).to(tl.float32) + tl.load(decay_bias + h).to(
                tl.float32
            )
            beta = softplus(step_size)
    place = row.to(tl.int64) * V
    at = place * K + keys[:, None] * V + values[None, :]
    mask = has_key[:, None] & has_value[None, :]
    u = bonus
    if bonus is not None:
        u = tl.load(bonus + h * K + keys, mask=has_key, other=0.0).to(tl.float32)
    S = tl.load(state + at, mask=mask, other=0.0)
    o, S = advanced(S, decay, xq, xk, target, beta, u, DELTA)
    tl.debug_barrier()
    tl.store(state + at, S, mask=mask)
    if READ != "none":
        read = tl.exp(log_gate(q, read_scores, h, keys, temperature, H, HQ, K, BH, KIND, IDENTITY))
        if READ == "query":
            o *= read
        if READ == "strength":
            tl.store(strength + row, read, mask=tl.program_id(1) == 0)
    if skip is not None:
        o += tl.load(skip + h).to(tl.float32) * v
    if READ == "output":
        o *= read
    tl.store(out + place + values, o.to(out.dtype.element_ty), mask=has_value)


class LayerKernels:
    """The launches of one layer."""

    def __init__(self, layer: Layer):
        self.kind, self.parts = layer.kind, layer.parts
        scale, self.norm_eps, self.group_eps, _, temperature, theta = layer.numbers
        _, H, HQ, K, V, *_ = layer.sizes
        kind, BK = layer.kind, block(K, LARGEST_KEY)
        self.common: dict[str, Any] = {
            "scale": scale, "temperature": temperature, "EPS": NORM_EPS, "H": H, "HQ": HQ, "K": K, "V": V, "BK": BK,
            "BV": block(V, max(16, PROGRAM // BK)), "BH": triton.next_power_of_2(H), "MAP": kind["feature_map"],
            "NORM": kind["qk_norm"], "LOG_THETA": math.log(theta or 1.0), "DECAY": kind["decay"],
            "DELTA": kind["rule"] == "delta", "BETA": kind["beta"], "READ": place_of_read(kind, "skip" in layer.names),
            "WRITE": kind["write"], "KIND": kind["activation"], "IDENTITY": kind["gate_scale"] == "identity",
            "num_warps": 4,
        }  # fmt: skip

    def run(
        self, given: dict[str, Tensor], projected: Tensor, memory: Tensor, history: Tensor | None, tokens: Tensor | None
    ) -> Tensor:
        """Computes [B, H V] from the weights and the projected input [B, parts], and updates the state."""
        qkv, decay, beta, gate = projected.split(self.parts, -1)
        with torch.cuda.device_of(qkv):
            if history is not None:
                qkv = self._convolve(qkv, given, history)
            out, strength = self._step(qkv, self._decay(decay, given), beta, given, memory, tokens)
            if tokens is not None:
                tokens += 1
            return self._read_out(out, strength, gate, given).view(len(projected), -1)

    def _convolve(self, x: Tensor, given: dict[str, Tensor], history: Tensor) -> Tensor:
        B, D, weight, y = *x.shape, given["conv_weight"], x.new_empty(x.shape)
        convolve_token[(B, -(-D // CHANNELS))](
            x, weight, given.get("conv_bias"), history, y, x.stride(0), D=D, W=weight.shape[-1], BD=CHANNELS,
        )  # fmt: skip
        return y

    def _decay(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Returns the logits of the decay, projected by PyTorch where they are of channels."""
        up, kind = given.get("decay_up"), self.kind["decay"]
        if up is None:
            return x
        if kind == "exp":
            return torch.tanh(x) @ up
        return F.linear(x, up, given["decay_bias"] if kind == "sigmoid" else None)

    def _step(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, given: dict[str, Tensor], memory: Tensor, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output [B, H, V], and the read gate [B, H] if it follows the norm."""
        B, H, V = len(qkv), self.common["H"], self.common["V"]
        out = qkv.new_empty(B, H, V)
        strength = qkv.new_empty(B, H, dtype=torch.float32) if self.common["READ"] == "strength" else None
        names = "decay_bias", "decay_log", "bonus", "read_scores", "write_scores", "skip"
        tensors = {name: given.get(name) for name in names}
        if self.kind["decay"] == "sigmoid":  # its bias is in the logits
            tensors["decay_bias"] = None
        layer_kernel[(B * H, -(-V // self.common["BV"]))](
            qkv=qkv, decay_part=decay, beta_part=beta, **tensors, tokens=tokens, state=memory, out=out,
            strength=strength, qkv_stride=qkv.stride(0), decay_stride=decay.stride(0), beta_stride=beta.stride(0),
            **self.common,
        )  # fmt: skip
        return out, strength

    def _read_out(self, out: Tensor, strength: Tensor | None, gate: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Returns [1, B, H, V] after norm and output gate; the batch is in the place of tokens."""
        norm, kind, logits = self.kind["norm"], self.kind["gate"], None
        if "gate_up" in given:
            gate = F.linear(gate, given["gate_up"], given["gate_bias"])
        if kind != "none":
            logits = gate.view(out.shape)[None]
        weight, bias = given.get("norm_weight"), given.get("norm_bias")
        if weight is None and logits is None:
            return out
        eps = self.group_eps if norm == "group" else self.norm_eps
        strength = None if strength is None else strength[None]
        (y,) = gated_norm(GatedNorm(
            out[None], logits, strength, weight, bias, norm, kind.removesuffix("-low-rank"), self.kind["order"], eps
        ))  # fmt: skip
        return y


def place_of_read(kind: dict[str, str], skip: bool) -> str:
    """Returns where the read gate multiplies: "query", before the skip, "output", after it, or "strength", after the
    norm."""
    if kind["read"] == "after_norm" and (kind["norm"] != "none" or skip):
        return "strength" if kind["norm"] in ("rms", "group") else "output"
    return "none" if kind["read"] == "none" else "query"
