"""The kernels that carry the state from chunk to chunk, forward and in reverse, one program per sequence, head and block of V.

    U = β w v (add),  or  β E with E = (I + A β)⁻¹ (w v − rows(k) S) (delta)
    out = scale · r (scores(q, k) U + rows(q) S)          S ← end(S) + cols(k)ᵀ U

rows(x)_i = x_i e^{G_i}, cols(x)_i = x_i e^{G_C − G_i}, end(S) = S e^{G_C}. Gates and β are one number per token and head:
they multiply rows of the result, so that no gated copy of q, k or v exists.
"""

import triton
import triton.language as tl

from .parts import (
    channel_decay,
    from_start,
    head_sums,
    last_of,
    left_of,
    matrix,
    numbers,
    places,
    product,
    sequence,
    store_tile,
    tile,
    to_end,
)


@triton.jit
def load_state(x, place, rows, columns, K, V):
    if x is None:
        return tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    return tl.load(x + place * K * V + matrix(rows, columns, V), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_state(into, S, place, rows, columns, K, V):
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    tl.store(into + place * K * V + matrix(rows, columns, V), S.to(into.dtype.element_ty), mask=mask)


@triton.jit
def chunk_matrix(x, place, rows, C: tl.constexpr):
    return tl.load(x + place * C * C + matrix(rows, rows, C)).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def scan(
    q, k, v, g, beta, write, read, scores, inverse, initial, out, final, states, errors, cu_seqlens, first_chunk,
    T, scale, q_stride, k_stride, v_stride, g_stride,
    H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of V, sequences × H). Writes what is not None of out, the final state [N, H, K, V], the states before
    each chunk [chunks, H, K, V], and E (errors) of the delta rule."""
    n, h = tl.program_id(1) // H, tl.program_id(1) % H
    hq = h // (H // HQ)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    begin, tokens, chunk = sequence(n, T, cu_seqlens, first_chunk, PACKED, C)
    S = load_state(initial, tl.program_id(1).to(tl.int64), keys, values, K, V)
    for i in range(0, tl.cdiv(tokens, C)):
        token, length, place = begin + i * C, tl.minimum(tokens - i * C, C), (chunk + i) * H + h
        if states is not None:
            store_state(states, S, place, keys, values, K, V)
        xk = tile(k, token, k_stride, hq * K, rows, length, keys, K)
        xv = tile(v, token, v_stride, h * V, rows, length, values, V)
        strength = numbers(beta, token, h, H, rows, length, 1.0)
        gate = numbers(write, token, h, H, rows, length, 1.0)
        nothing = tl.zeros((C, BV), tl.float32)
        if DECAY == "vector":
            this, after = channel_decay(g, token, g_stride, h * K, rows, length, keys, K)
            grown = tl.exp(from_start(this, C))
            kept = xk * tl.exp(to_end(after, rows, C))
        else:
            high, low = head_sums(g, token, h, H, rows, length, DECAY)
            seen, left = tl.exp(high), left_of(high, low, C)
        U = xv * gate[:, None]
        if DELTA:
            if DECAY == "vector":
                stored = product(xk * grown, S, nothing, OPERAND, PRECISION)
            else:
                stored = product(xk, S, nothing, OPERAND, PRECISION) * seen[:, None]
            U = product(chunk_matrix(inverse, place, rows, C), U - stored, nothing, OPERAND, PRECISION)
            if errors is not None:
                store_tile(errors, U, token, H * V, h * V, rows, length, values, V)
        U *= strength[:, None]
        if out is not None:
            xq = tile(q, token, q_stride, hq * K, rows, length, keys, K)
            if DECAY == "vector":
                o = product(xq * grown, S, nothing, OPERAND, PRECISION)
            else:
                o = product(xq, S, nothing, OPERAND, PRECISION) * seen[:, None]
            o = product(chunk_matrix(scores, place, rows, C), U, o, OPERAND, PRECISION)
            o *= scale * numbers(read, token, h, H, rows, length, 1.0)[:, None]
            store_tile(out, o, token, H * V, h * V, rows, length, values, V)
        if DECAY == "vector":
            S = product(tl.trans(kept), U, S * tl.exp(tl.sum(this, 0))[:, None], OPERAND, PRECISION)
        else:
            S = product(tl.trans(xk), U * left[:, None], S * tl.exp(last_of(high, C)), OPERAND, PRECISION)
    if final is not None:
        store_state(final, S, tl.program_id(1).to(tl.int64), keys, values, K, V)


@triton.jit(do_not_specialize=["T"])
def reverse_scan(
    q, k, g, beta, write, read, scores, inverse, d_out, d_final, d_target, d_states, d_initial, cu_seqlens, first_chunk,
    T, scale, q_stride, k_stride, g_stride,
    H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of V, sequences × H). Writes the gradients to the state after each chunk (d_states [chunks, H, K, V]),
    to the initial state, and d_target [tokens, H, V]: the gradient to v (add), or to w v − rows(k) S (delta)."""
    n, h = tl.program_id(1) // H, tl.program_id(1) % H
    hq = h // (H // HQ)
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    begin, tokens, chunk = sequence(n, T, cu_seqlens, first_chunk, PACKED, C)
    dS = load_state(d_final, tl.program_id(1).to(tl.int64), keys, values, K, V)
    last = tl.cdiv(tokens, C) - 1
    for j in range(0, last + 1):
        i = last - j
        token, length, place = begin + i * C, tl.minimum(tokens - i * C, C), (chunk + i) * H + h
        store_state(d_states, dS, place, keys, values, K, V)
        xq = tile(q, token, q_stride, hq * K, rows, length, keys, K)
        xk = tile(k, token, k_stride, hq * K, rows, length, keys, K)
        do = tile(d_out, token, H * V, h * V, rows, length, values, V)
        do *= scale * numbers(read, token, h, H, rows, length, 1.0)[:, None]
        strength = numbers(beta, token, h, H, rows, length, 1.0)
        nothing = tl.zeros((C, BV), tl.float32)
        if DECAY == "vector":
            this, after = channel_decay(g, token, g_stride, h * K, rows, length, keys, K)
            grown = tl.exp(from_start(this, C))
            dU = product(xk * tl.exp(to_end(after, rows, C)), dS, nothing, OPERAND, PRECISION)
            end = tl.exp(tl.sum(this, 0))[:, None]
            readers, at_keys, do_rows = xq * grown, xk * grown, do
        else:
            high, low = head_sums(g, token, h, H, rows, length, DECAY)
            seen = tl.exp(high)[:, None]
            dU = product(xk, dS, nothing, OPERAND, PRECISION) * left_of(high, low, C)[:, None]
            end = tl.exp(last_of(high, C))
            readers, at_keys, do_rows = xq, xk, do * seen
        dU = product(tl.trans(chunk_matrix(scores, place, rows, C)), do, dU, OPERAND, PRECISION)
        dU *= strength[:, None]
        dS = product(tl.trans(readers), do_rows, dS * end, OPERAND, PRECISION)
        if DELTA:
            dU = product(tl.trans(chunk_matrix(inverse, place, rows, C)), dU, nothing, OPERAND, PRECISION)
            if DECAY == "vector":
                dS -= product(tl.trans(at_keys), dU, tl.zeros_like(dS), OPERAND, PRECISION)
            else:
                dS -= product(tl.trans(at_keys), dU * seen, tl.zeros_like(dS), OPERAND, PRECISION)
        else:
            dU *= numbers(write, token, h, H, rows, length, 1.0)[:, None]
        store_tile(d_target, dU, token, H * V, h * V, rows, length, values, V)
    store_state(d_initial, dS, tl.program_id(1).to(tl.int64), keys, values, K, V)
