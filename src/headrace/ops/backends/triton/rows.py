"""Kernels over the channels of a head: the L2 norm, RMSNorm of a sum and with an output gate, rotary positions, and the
decay −e^rate softplus(± (x + bias)), with their gradients; over all channels of a token, x SiLU(gate); and over the
heads of a token, the gates of head competition, and RMSNorm of several heads with the output gate before it.

A program over heads holds R rows [R, BK], a row being the K channels of one head of one token. x and the gate have a
stride between tokens, all other tensors are contiguous. The backward computes the forward anew. Sums are in float32.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of(group, total, H, K, R: tl.constexpr, BK: tl.constexpr):
    """Returns of a group of R rows their indices, heads, channels and mask [R, BK]."""
    rows, channels = group.to(tl.int64) * R + tl.arange(0, R), tl.arange(0, BK)
    return rows, rows % H, channels, (rows < total)[:, None] & (channels < K)[None, :]


@triton.jit
def loaded(x, stride, rows, heads, channels, mask, H, K):
    at = (rows // H * stride + heads * K)[:, None] + channels[None, :]
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["x_stride", "total"])
def l2_norm(x, y, x_stride, total, H, K, eps, R: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr):
    """Grid: (groups of R rows,). Writes y = x / √(|x|² + eps)."""
    rows, heads, channels, mask = rows_of(tl.program_id(0), total, H, K, R, BK)
    row = loaded(x, x_stride * ALIGN, rows, heads, channels, mask, H, K)
    row *= tl.rsqrt(tl.sum(row * row, 1) + eps)[:, None]
    tl.store(y + rows[:, None] * K + channels[None, :], row.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_stride", "total"])
def l2_norm_backward(
    x, d_y, d_x, x_stride, total, H, K, eps, R: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Grid: (groups of R rows,). Writes d_x = (d_y − y (y · d_y)) / √(|x|² + eps)."""
    rows, heads, channels, mask = rows_of(tl.program_id(0), total, H, K, R, BK)
    row = loaded(x, x_stride * ALIGN, rows, heads, channels, mask, H, K)
    d_row = loaded(d_y, H * K, rows, heads, channels, mask, H, K)
    inverse = tl.rsqrt(tl.sum(row * row, 1) + eps)[:, None]
    row *= inverse
    d_row = inverse * (d_row - row * tl.sum(row * d_row, 1)[:, None])
    tl.store(d_x + rows[:, None] * K + channels[None, :], d_row.to(d_x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_stride", "gate_stride", "total"])
def norm(
    x, gate, weight, added, sums, y, x_stride, gate_stride, total, H, K, eps, SILU: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of R rows,). Writes y = x / √(mean x² + eps) · weight · σ(gate), or SiLU(gate) in place of σ; where
    something is added to x, also sums = x + added, whose norm it is."""
    rows, heads, channels, mask = rows_of(tl.program_id(0), total, H, K, R, BK)
    row, at = loaded(x, x_stride * ALIGN, rows, heads, channels, mask, H, K), rows[:, None] * K + channels[None, :]
    if added is not None:
        row = (row + loaded(added, H * K, rows, heads, channels, mask, H, K)).to(sums.dtype.element_ty)
        tl.store(sums + at, row, mask=mask)
        row = row.to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row, 1) / K + eps)[:, None]
    if gate is not None:
        z = loaded(gate, gate_stride * ALIGN, rows, heads, channels, mask, H, K)
        row *= tl.sigmoid(z) * (z if SILU else 1.0)
    if weight is not None:
        row *= tl.load(weight + channels, mask=channels < K, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, row.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_stride", "gate_stride", "total"])
def norm_backward(
    x, gate, weight, d_sums, d_y, d_gate, d_weight, d_x, x_stride, gate_stride, total, H, K, eps, SILU: tl.constexpr,
    GROUPS: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (GROUPS groups of R rows,). Writes d_gate, d_x, to which d_sums is added, and d_weight [programs, K], whose
    sum over programs is the gradient to the weight."""
    w, sums = 1.0, tl.zeros((BK,), tl.float32)
    if weight is not None:
        w = tl.load(weight + tl.arange(0, BK), mask=tl.arange(0, BK) < K, other=0.0).to(tl.float32)[None, :]
    for i in range(GROUPS):
        rows, heads, channels, mask = rows_of(tl.program_id(0) * GROUPS + i, total, H, K, R, BK)
        row = loaded(x, x_stride * ALIGN, rows, heads, channels, mask, H, K)
        d_row = loaded(d_y, H * K, rows, heads, channels, mask, H, K)
        inverse, at = tl.rsqrt(tl.sum(row * row, 1) / K + eps), rows[:, None] * K + channels[None, :]
        inverse = tl.where(rows < total, inverse, 0.0)[:, None]  # which without eps is ∞ where there is no row
        row *= inverse
        if gate is not None:
            z = loaded(gate, gate_stride * ALIGN, rows, heads, channels, mask, H, K)
            s = tl.sigmoid(z)
            d_z = d_row * row * w * s * ((1 + z * (1 - s)) if SILU else (1 - s))
            tl.store(d_gate + at, d_z.to(d_gate.dtype.element_ty), mask=mask)
            d_row *= s * (z if SILU else 1.0)
        sums += tl.sum(d_row * row, 0)
        d_row *= w
        d_row = inverse * (d_row - row * (tl.sum(row * d_row, 1) / K)[:, None])
        if d_sums is not None:
            d_row += loaded(d_sums, H * K, rows, heads, channels, mask, H, K)
        tl.store(d_x + at, d_row.to(d_x.dtype.element_ty), mask=mask)
    if d_weight is not None:
        into = d_weight + tl.program_id(0).to(tl.int64) * K + tl.arange(0, BK)
        tl.store(into, sums, mask=tl.arange(0, BK) < K)


@triton.jit(do_not_specialize=["x_stride", "total", "places"])
def rotate(
    x, cos, sin, y, x_stride, total, H, K, F, places, R: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Grid: (groups of R rows,). Rotates channel i < F with channel i + F, token t by cos and sin [t mod places, F]."""
    rows, heads, channels, mask = rows_of(tl.program_id(0), total, H, K, R, BK)
    first, turned = channels < F, mask & (channels < 2 * F)[None, :]
    other = tl.where(first, channels + F, channels - F)
    at = (rows // H % places * F)[:, None] + tl.where(first, channels, other)[None, :]
    c, s = tl.load(cos + at, mask=turned, other=1.0), tl.load(sin + at, mask=turned, other=0.0)
    here = loaded(x, x_stride * ALIGN, rows, heads, channels, mask, H, K)
    there = loaded(x, x_stride * ALIGN, rows, heads, other, turned, H, K)
    result = here * c + tl.where(first[None, :], -there, there) * s
    tl.store(y + rows[:, None] * K + channels[None, :], result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def decayed(x, bias, rates, stride, rows, heads, channels, mask, H, K, sign, rate, far, limit):
    """Returns (z, A, rate, log_decay) of a program's rows: see `softplus_decay` in layers/linear/decays.py. With d =
    how far z is below `far`, rate is e^(A − d), at most e^limit, and log_decay = −rate softplus(z + d)."""
    z = loaded(x, stride, rows, heads, channels, mask, H, K)
    if bias is not None:
        z += loaded(bias, 0, rows, heads, channels, mask, H, K)
    z *= sign
    A = rate
    if rates is not None:
        A = tl.load(rates + heads).to(tl.float32)[:, None]
    below = tl.minimum(tl.maximum(far - z, 0.0), 1e30)  # finite: a z of −∞ has a decay of 0
    e = tl.exp(-tl.abs(z + below))
    s = e / (2 + e)  # log(1 + e) = 2 artanh(s), s ≤ 1/3; its series, since a GPU's logarithm has few digits near 1
    t = s * s
    series = 1 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13 + t / 15))))))
    rate = tl.exp(tl.minimum(A - below, limit))
    return z, A, rate, -rate * (tl.maximum(z + below, 0.0) + 2 * s * series)


@triton.jit(do_not_specialize=["x_stride", "total"])
def softplus_decay(
    x, bias, rates, y, x_stride, total, H, K, sign, rate, far, limit, R: tl.constexpr, BK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of R rows,). Writes y = log_decay."""
    rows, heads, channels, mask = rows_of(tl.program_id(0), total, H, K, R, BK)
    result = decayed(x, bias, rates, x_stride * ALIGN, rows, heads, channels, mask, H, K, sign, rate, far, limit)[3]
    tl.store(y + rows[:, None] * K + channels[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["x_stride", "total"])
def softplus_decay_backward(
    x, bias, rates, d_y, d_rates, d_x, x_stride, total, H, K, sign, rate, far, limit, R: tl.constexpr,
    BK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of R rows,). Writes d_x, and the gradient to the rate from each row alone, d_rates [total]."""
    rows, heads, channels, mask = rows_of(tl.program_id(0), total, H, K, R, BK)
    stride = x_stride * ALIGN
    z, A, rate, result = decayed(x, bias, rates, stride, rows, heads, channels, mask, H, K, sign, rate, far, limit)
    d_row = loaded(d_y, H * K, rows, heads, channels, mask, H, K)
    d_rate = d_row * tl.where(A - tl.maximum(far - z, 0.0) <= limit, result, 0.0)
    d_row = sign * tl.where(z < far, d_rate, -rate * tl.sigmoid(z) * d_row)
    tl.store(d_x + rows[:, None] * K + channels[None, :], d_row.to(d_x.dtype.element_ty), mask=mask)
    if d_rates is not None:
        tl.store(d_rates + rows, tl.sum(d_rate, 1), mask=rows < total)


@triton.jit
def of_token(x, stride, at, C):
    return tl.load(x + tl.program_id(0).to(tl.int64) * stride + at, mask=at < C, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["x_stride", "gate_stride"])
def silu_product(x, gate, y, x_stride, gate_stride, C, BC: tl.constexpr, ALIGN: tl.constexpr):
    """Grid: (tokens, groups of BC channels). Writes y = x SiLU(gate)."""
    at = tl.program_id(1) * BC + tl.arange(0, BC)
    z = of_token(gate, gate_stride * ALIGN, at, C)
    result = of_token(x, x_stride * ALIGN, at, C) * z * tl.sigmoid(z)
    tl.store(y + tl.program_id(0).to(tl.int64) * C + at, result.to(y.dtype.element_ty), mask=at < C)


@triton.jit(do_not_specialize=["x_stride", "gate_stride"])
def silu_product_backward(
    x, gate, d_y, d_x, d_gate, x_stride, gate_stride, C, BC: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Grid: (tokens, groups of BC channels). Writes the gradients to x and to the gate."""
    at = tl.program_id(1) * BC + tl.arange(0, BC)
    z, d = of_token(gate, gate_stride * ALIGN, at, C), of_token(d_y, C, at, C)
    s = tl.sigmoid(z)
    d_z = d * of_token(x, x_stride * ALIGN, at, C) * s * (1 + z * (1 - s))
    into = tl.program_id(0).to(tl.int64) * C + at
    tl.store(d_x + into, (d * z * s).to(d_x.dtype.element_ty), mask=at < C)
    tl.store(d_gate + into, d_z.to(d_gate.dtype.element_ty), mask=at < C)


@triton.jit(do_not_specialize=["x_stride", "total"])
def head_gate(
    x, weight, d_gate, sums, result, x_stride, total, H, HQ, K, rate, HB: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, LOG: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (programs,), each for every n-th token. Writes the gates, result [total, H]; or, unless d_gate is None, the
    gradient to ⟨x_h, w_h⟩, and that to the weights from the tokens of each program, sums [programs, H, K]."""
    heads, channels, token = tl.arange(0, HB), tl.arange(0, BK), tl.program_id(0).to(tl.int64)
    mask, at = (heads < H)[:, None] & (channels < K)[None, :], heads[:, None] * K + channels[None, :]
    w = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    shared = (heads // (H // HQ) * K)[:, None] + channels[None, :]
    d_weight = tl.zeros((HB, BK), tl.float32)
    while token < total:
        row = tl.load(x + token * x_stride * ALIGN + shared, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(heads < H, rate * tl.sum(row * w, 1), float("-inf"))
        score -= tl.max(score, 0)
        share = score - tl.log(tl.sum(tl.exp(score), 0))
        gate = share
        if SCALE:  # log H by the same function as above, so that equal scores have gates of 1
            gate += tl.log(tl.sum(tl.where(heads < H, 1.0, 0.0), 0))
        if not LOG:
            gate = tl.exp(gate)
        if d_gate is not None:
            d = tl.load(d_gate + token * H + heads, mask=heads < H, other=0.0).to(tl.float32)
            d = d if LOG else d * gate
            gate = rate * (d - tl.exp(share) * tl.sum(d, 0))
            d_weight += gate[:, None] * row
        tl.store(result + token * H + heads, gate.to(result.dtype.element_ty), mask=heads < H)
        token += tl.num_programs(0)
    if sums is not None:
        tl.store(sums + tl.program_id(0).to(tl.int64) * H * K + at, d_weight, mask=mask)


@triton.jit
def of_heads(x, token, stride, at, mask):
    return tl.load(x + token * stride + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def heads_of(HG, K, HB: tl.constexpr, BK: tl.constexpr):
    """Returns the number of all heads, and of the program's group of HG the heads [HB, 1], their mask, the places of
    their channels [HB, BK] and the mask of these."""
    local, channels = tl.arange(0, HB)[:, None], tl.arange(0, BK)[None, :]
    heads = tl.program_id(1) * HG + local
    return tl.num_programs(1) * HG, heads, local < HG, heads * K + channels, (local < HG) & (channels < K)


@triton.jit
def gated(x, gate, v, skip, read, token, x_stride, gate_stride, v_stride, H, heads, inside, at, mask):
    """Returns of some heads of a token x + skip v, the read gate and the output gate's logits."""
    row, r = of_heads(x, token, x_stride, at, mask), 1.0
    if skip is not None:
        row += of_heads(skip, 0, 0, heads, inside) * of_heads(v, token, v_stride, at, mask)
    if read is not None:
        r = of_heads(read, token, H, heads, inside)
    return row, r, of_heads(gate, token, gate_stride, at, mask)


@triton.jit(do_not_specialize=["x_stride", "gate_stride", "v_stride"])
def gate_norm(
    x, gate, v, skip, read, weight, y, x_stride, gate_stride, v_stride, HG, K, eps, HB: tl.constexpr,
    BK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, groups of HG heads). Writes y = weight · RMSNorm((x + skip v) · read · SiLU(gate)) of a group."""
    token = tl.program_id(0).to(tl.int64)
    H, heads, inside, at, mask = heads_of(HG, K, HB, BK)
    x_stride, gate_stride, v_stride = x_stride * ALIGN, gate_stride * ALIGN, v_stride * ALIGN
    row, r, z = gated(x, gate, v, skip, read, token, x_stride, gate_stride, v_stride, H, heads, inside, at, mask)
    row *= r * z * tl.sigmoid(z)
    row *= tl.rsqrt(tl.sum(row * row) / (HG * K) + eps)
    if weight is not None:
        row *= of_heads(weight, 0, 0, at, mask)
    tl.store(y + token * H * K + at, row.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_stride", "gate_stride", "v_stride", "total"])
def gate_norm_backward(
    x, gate, v, skip, read, weight, d_y, d_read, d_skip, d_weight, d_gate, d_x, x_stride, gate_stride, v_stride, total,
    HG, K, eps, HB: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (programs, groups of HG heads), each for every n-th token. Writes d_x, d_gate and d_read, and sums over the
    tokens of a program, d_skip [programs, H] and d_weight [programs, H, K]. The gradient to v is skip · d_x."""
    token = tl.program_id(0).to(tl.int64)
    H, heads, inside, at, mask = heads_of(HG, K, HB, BK)
    x_stride, gate_stride, v_stride = x_stride * ALIGN, gate_stride * ALIGN, v_stride * ALIGN
    w, of_skip, of_weight = 1.0, tl.zeros((HB, 1), tl.float32), tl.zeros((HB, BK), tl.float32)
    if weight is not None:
        w = of_heads(weight, 0, 0, at, mask)
    while token < total:
        row, r, z = gated(x, gate, v, skip, read, token, x_stride, gate_stride, v_stride, H, heads, inside, at, mask)
        s, into = tl.sigmoid(z), token * H * K + at
        normal = row * r * z * s
        inverse = tl.rsqrt(tl.sum(normal * normal) / (HG * K) + eps)
        normal *= inverse
        d = of_heads(d_y, token, H * K, at, mask)
        of_weight += d * normal
        d *= w
        d = inverse * (d - normal * (tl.sum(normal * d) / (HG * K)))
        tl.store(d_gate + into, (d * row * r * s * (1 + z * (1 - s))).to(d_gate.dtype.element_ty), mask=mask)
        d *= z * s
        if d_read is not None:
            d_r = tl.sum(d * row, 1, keep_dims=True)
            tl.store(d_read + token * H + heads, d_r.to(d_read.dtype.element_ty), mask=inside)
        d *= r
        if d_skip is not None:
            of_skip += tl.sum(d * of_heads(v, token, v_stride, at, mask), 1, keep_dims=True)
        tl.store(d_x + into, d.to(d_x.dtype.element_ty), mask=mask)
        token += tl.num_programs(0)
    program = tl.program_id(0).to(tl.int64)
    if d_skip is not None:
        tl.store(d_skip + program * H + heads, of_skip, mask=inside)
    if d_weight is not None:
        tl.store(d_weight + program * H * K + at, of_weight, mask=mask)
