"""The kernels that carry the state from chunk to chunk, forward and in reverse.

A program computes all chunks of one sequence, head and block of V:

    U = β w v (add),  or  β E with E = (I + A β)⁻¹ (w v − rows(k) S) (delta)
    out = scale · r (scores(q, k) U + rows(q) S)          S ← end(S) + cols(k)ᵀ U

rows(x)_i = x_i e^{G_i}, cols(x)_i = x_i e^{G_C − G_i}, end(S) = S e^{G_C}, with G the sums of log_decay in the chunk.
Gates and β multiply rows of products, so that there are no gated copies of q, k and v in memory. Without a decay per
channel the factors of rows(k) and cols(k) do, too, and k is loaded for both; by the delta rule once if KEEP is set. A
tile has a power of two of rows, so that the state may be in two tiles, of BK and of BK2 keys. The loops have
disable_licm for the reason given in gradients.py, and num_stages so that Triton also loads ahead what only the branches
of `isolated_dot` take.
"""

import triton
import triton.language as tl

from .parts import head_sums, isolated_dot, last_of, left_of, matrix, numbers, product, sequence, store_tile, tile


@triton.jit
def more_keys(BK: tl.constexpr, BK2: tl.constexpr):
    """Returns the keys of the second tile of the state, [BK2], or None."""
    if BK2 > 0:
        result = BK + tl.arange(0, BK2)
    else:
        result = None
    return result


@triton.jit
def load_state(x, place, keys, values, K: tl.constexpr, V: tl.constexpr):
    if keys is None:
        S = None
    elif x is None:
        S = tl.zeros((keys.shape[0], values.shape[0]), tl.float32)
    else:
        S = tile(x, place * K, V, 0, keys, K, values, V)
    return S


@triton.jit
def store_state(into, S, place, keys, values, K: tl.constexpr, V: tl.constexpr):
    if keys is not None:
        store_tile(into, S, place * K, V, 0, keys, K, values, V)


@triton.jit
def against(x, x2, S, S2, length, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Returns x S [C, BV], with both tiles of their keys."""
    result = isolated_dot(x, S, length, OPERAND, PRECISION)
    if S2 is not None:
        result += isolated_dot(x2, S2, length, OPERAND, PRECISION)
    return result


@triton.jit
def chunk_matrix(x, place, rows, C: tl.constexpr):
    return tl.load(x + place * C * C + matrix(rows, rows, C)).to(tl.float32)


@triton.jit
def values_of(v, write, token, v_stride, h, rows, length, values, H: tl.constexpr, V: tl.constexpr):
    """Returns w v [C, BV]."""
    x = tile(v, token, v_stride, h * V, rows, length, values, V)
    return x * numbers(write, token, h, H, rows, length, 1.0)[:, None]


@triton.jit
def end_of(end, high, place, keys, K, C: tl.constexpr, DECAY: tl.constexpr):
    """Returns the decay of the state over a chunk, [BK, 1]."""
    if DECAY == "vector":
        each = tl.load(end + place * K + keys, mask=keys < K, other=0.0)
    else:
        each = tl.zeros(keys.shape, tl.float32) + tl.exp(last_of(high, C))
    return each[:, None]


@triton.jit(do_not_specialize=["T", "q_stride", "k_stride", "v_stride"])
def scan(
    q, k_rows, k_cols, v, g, end, beta, write, read, scores, inverse, initial, out, final, states, errors, cu_seqlens,
    first_chunk, T, scale, q_stride, k_stride, v_stride,
    H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BK2: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences × H, blocks of V). Writes what is not None of out, the final state [N, H, K, V], the states
    before each chunk [chunks, H, K, V], and E (errors) of the delta rule."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    hq = h // (H // HQ)
    q_stride, k_stride, v_stride = q_stride * ALIGN, k_stride * ALIGN, v_stride * ALIGN
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    begin, tokens, chunk = sequence(n, T, cu_seqlens, first_chunk, PACKED, C)
    keys2 = more_keys(BK, BK2)
    S = load_state(initial, tl.program_id(0).to(tl.int64), keys, values, K, V)
    S2 = load_state(initial, tl.program_id(0).to(tl.int64), keys2, values, K, V)
    for i in tl.range(tl.cdiv(tokens, C), num_stages=STAGES, disable_licm=True):
        token, length, place = begin + i * C, tl.minimum(tokens - i * C, C), (chunk + i) * H + h
        if states is not None:
            store_state(states, S, place, keys, values, K, V)
            store_state(states, S2, place, keys2, values, K, V)
        high, low = head_sums(g, token, h, H, rows, length, DECAY)
        seen = tl.exp(high)[:, None]
        U = values_of(v, write, token, v_stride, h, rows, length, values, H, V)
        if DELTA:
            xk = tile(k_rows, token, k_stride, hq * K, rows, length, keys, K)
            xk2 = tile(k_rows, token, k_stride, hq * K, rows, length, keys2, K)
            U -= against(xk, xk2, S, S2, length, OPERAND, PRECISION) * seen
            solved = chunk_matrix(inverse, place, rows, C)
            U = isolated_dot(solved, U, length, OPERAND, PRECISION)
            if errors is not None:
                store_tile(errors, U, token, H * V, h * V, rows, length, values, V)
        U *= numbers(beta, token, h, H, rows, length, 1.0)[:, None]
        if out is not None:
            xq = tile(q, token, q_stride, hq * K, rows, length, keys, K)
            xq2 = tile(q, token, q_stride, hq * K, rows, length, keys2, K)
            reading = scale * numbers(read, token, h, H, rows, length, 1.0)[:, None]
            o = against(xq, xq2, S, S2, length, OPERAND, PRECISION) * (seen * reading)
            o += isolated_dot(chunk_matrix(scores, place, rows, C), U, length, OPERAND, PRECISION) * reading
            store_tile(out, o, token, H * V, h * V, rows, length, values, V)
        if not (DELTA and KEEP):
            xk = tile(k_cols, token, k_stride, hq * K, rows, length, keys, K)
            xk2 = tile(k_cols, token, k_stride, hq * K, rows, length, keys2, K)
        U *= left_of(high, low, C)[:, None]
        S = product(tl.trans(xk), U, S * end_of(end, high, place, keys, K, C, DECAY), OPERAND, PRECISION)
        if BK2 > 0:
            S2 *= end_of(end, high, place, keys2, K, C, DECAY)
            S2 += isolated_dot(tl.trans(xk2), U, length, OPERAND, PRECISION)
    if final is not None:
        store_state(final, S, tl.program_id(0).to(tl.int64), keys, values, K, V)
        store_state(final, S2, tl.program_id(0).to(tl.int64), keys2, values, K, V)


@triton.jit(do_not_specialize=["T", "q_stride", "k_stride"])
def reverse_scan(
    q, k_rows, k_cols, g, end, beta, write, read, scores, inverse, d_out, d_final, d_target, d_states, d_initial,
    cu_seqlens, first_chunk, T, scale, q_stride, k_stride,
    H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BK2: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences × H, blocks of V). Writes the gradients to the state after each chunk (d_states [chunks, H, K,
    V]), to the initial state, and d_target [tokens, H, V]: the gradient to v (add), or to w v − rows(k) S (delta). The
    first and the last may be None."""
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    hq = h // (H // HQ)
    q_stride, k_stride = q_stride * ALIGN, k_stride * ALIGN
    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    begin, tokens, chunk = sequence(n, T, cu_seqlens, first_chunk, PACKED, C)
    keys2 = more_keys(BK, BK2)
    dS = load_state(d_final, tl.program_id(0).to(tl.int64), keys, values, K, V)
    dS2 = load_state(d_final, tl.program_id(0).to(tl.int64), keys2, values, K, V)
    last = tl.cdiv(tokens, C) - 1
    for j in tl.range(last + 1, num_stages=STAGES, disable_licm=True):
        i = last - j
        token, length, place = begin + i * C, tl.minimum(tokens - i * C, C), (chunk + i) * H + h
        if d_states is not None:
            store_state(d_states, dS, place, keys, values, K, V)
            store_state(d_states, dS2, place, keys2, values, K, V)
        high, low = head_sums(g, token, h, H, rows, length, DECAY)
        seen = tl.exp(high)[:, None]
        do = tile(d_out, token, H * V, h * V, rows, length, values, V)
        do *= scale * numbers(read, token, h, H, rows, length, 1.0)[:, None]
        dU = isolated_dot(tl.trans(chunk_matrix(scores, place, rows, C)), do, length, OPERAND, PRECISION)
        xk = tile(k_cols, token, k_stride, hq * K, rows, length, keys, K)
        xk2 = tile(k_cols, token, k_stride, hq * K, rows, length, keys2, K)
        dU += against(xk, xk2, dS, dS2, length, OPERAND, PRECISION) * left_of(high, low, C)[:, None]
        dU *= numbers(beta, token, h, H, rows, length, 1.0)[:, None]
        xq = tl.trans(tile(q, token, q_stride, hq * K, rows, length, keys, K))
        dS = product(xq, do * seen, dS * end_of(end, high, place, keys, K, C, DECAY), OPERAND, PRECISION)
        if BK2 > 0:
            xq2 = tl.trans(tile(q, token, q_stride, hq * K, rows, length, keys2, K))
            dS2 *= end_of(end, high, place, keys2, K, C, DECAY)
            dS2 += isolated_dot(xq2, do * seen, length, OPERAND, PRECISION)
        if DELTA:
            solved = tl.trans(chunk_matrix(inverse, place, rows, C))
            dU = isolated_dot(solved, dU, length, OPERAND, PRECISION)
            if not KEEP:
                xk = tile(k_rows, token, k_stride, hq * K, rows, length, keys, K)
                xk2 = tile(k_rows, token, k_stride, hq * K, rows, length, keys2, K)
            dS += isolated_dot(tl.trans(xk), dU * -seen, length, OPERAND, PRECISION)
            if BK2 > 0:
                dS2 += isolated_dot(tl.trans(xk2), dU * -seen, length, OPERAND, PRECISION)
        else:
            dU *= numbers(write, token, h, H, rows, length, 1.0)[:, None]
        if d_target is not None:
            store_tile(d_target, dU, token, H * V, h * V, rows, length, values, V)
    store_state(d_initial, dS, tl.program_id(0).to(tl.int64), keys, values, K, V)
    store_state(d_initial, dS2, tl.program_id(0).to(tl.int64), keys2, values, K, V)
