"""The last kernel of the backward: the gradients to q, k, the decay and the numbers per token, for all chunks at once.

With R = dO Eᵀ (E = v under "add"), r' = scale · r, f = β w ("add") or β ("delta"), and sums over the pairs j ≤ i of a
chunk:

    dq_i = r'_i (Σ_j R_ij f_j e^{G_i − G_j} k_j + rows(dO Sᵀ)_i)
    dk_j = f_j (Σ_i R_ij r'_i e^{G_i − G_j} q_i + cols(E dSᵀ)_j)

The delta rule adds the same terms for the pairs (k_i, k_j), j < i, with −dP in place of dO, where P = w v − rows(k) S.
The gradient to r is the row sum of q times the bracket, and the gradient to f that of k times the bracket: no division
by r or f. The gradient to a token's log_decay is the direct sum over all pairs of an earlier writer and a reader at or
after the token, inside and outside the chunk.

In the code R2 is −dP Eᵀ, rq_i = r'_i q_i and fk_j = f_j k_j. Loops with disable_licm compute addresses and masks where
they are used: before the loop, they would take registers through all of it, and others would be spilled.
"""

import triton
import triton.language as tl

from .parts import (
    SUB,
    channel_decay,
    from_start,
    head_sums,
    isolated_dot,
    last_of,
    left_of,
    level_factors,
    matrix,
    may_factor,
    numbers,
    pair_decay,
    product,
    segment_sums,
    span,
    store_numbers,
    store_tile,
    tile,
    to_end,
    together,
)
from .scan import chunk_matrix, load_state


@triton.jit
def pair_gradients(
    d_out, d_target, e, e_stride, token, h, rows, length, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DELTA: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns R = dO Eᵀ and −dP Eᵀ, [C, C]."""
    read = tl.zeros((C, C), tl.float32)
    written = tl.zeros((C, C), tl.float32)
    for start in range(0, V, BV):
        values = start + tl.arange(0, BV)
        do = tile(d_out, token, H * V, h * V, rows, length, values, V)
        target = tl.trans(tile(e, token, e_stride, h * V, rows, length, values, V))
        read = product(do, target, read, OPERAND, PRECISION)
        if DELTA:
            dp = tile(d_target, token, H * V, h * V, rows, length, values, V)
            written = product(dp, target, written, OPERAND, PRECISION)
    return read, -written


@triton.jit
def state_gradients(
    d_out, d_target, e, e_stride, states, d_states, token, place, h, rows, length, keys,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DELTA: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns dO Sᵀ, −dP Sᵀ, E dSᵀ [C, BK], and the sums of S dS over V, [BK]."""
    read = tl.zeros((C, BK), tl.float32)
    erased = tl.zeros((C, BK), tl.float32)
    written = tl.zeros((C, BK), tl.float32)
    passing = tl.zeros((BK,), tl.float32)
    for start in range(0, V, BV):
        values = start + tl.arange(0, BV)
        S = load_state(states, place, keys, values, K, V)
        dS = load_state(d_states, place, keys, values, K, V)
        passing += tl.sum(S * dS, 1)
        do = tile(d_out, token, H * V, h * V, rows, length, values, V)
        target = tile(e, token, e_stride, h * V, rows, length, values, V)
        read = product(do, tl.trans(S), read, OPERAND, PRECISION)
        written = product(target, tl.trans(dS), written, OPERAND, PRECISION)
        if DELTA:
            dp = tile(d_target, token, H * V, h * V, rows, length, values, V)
            erased = product(dp, tl.trans(S), erased, OPERAND, PRECISION)
    return read, -erased, written, passing


@triton.jit
def store_pairs(pairs, R, R2, rows, C: tl.constexpr, DELTA: tl.constexpr):
    """Stores R and −dP Eᵀ [C, C] for the loop over key channels.

    Matrices that live through the loop, once in the layout of each product, would be spilled."""
    at = pairs + matrix(rows, rows, C)
    tl.store(at, R.to(pairs.dtype.element_ty))
    if DELTA:
        tl.store(at + C * C, R2.to(pairs.dtype.element_ty))
    tl.debug_barrier()


@triton.jit
def factored_pairs(
    pairs, rq, fk, xk, late, early, rows, length, M: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns the gradients to r' q, to k as a reader and to f k as a writer, [C, BK].

    They are those of the pairs in the same block of M tokens whose decay is the product of the reader's factor `late`
    and the writer's factor `early` [C, BK]; of other pairs one of the factors is zero."""
    nothing = tl.zeros(fk.shape, tl.float32)
    at, near = pairs + matrix(rows, rows, C), together(rows, M)
    R = tl.load(at, mask=near, other=0.0)
    writers = fk * early
    to_q = late * product(R, writers, nothing, OPERAND, PRECISION)
    to_writer = product(tl.trans(R), rq * late, nothing, OPERAND, PRECISION)
    to_reader = nothing
    if DELTA:
        R2 = tl.load(at + C * C, mask=near, other=0.0)
        to_reader = late * product(R2, writers, nothing, OPERAND, PRECISION)
        to_writer += isolated_dot(tl.trans(R2), xk * late, length, OPERAND, PRECISION)
    return to_q, to_reader, early * to_writer


@triton.jit
def visited_pairs(
    pairs, reading, f, q, k, q_stride, k_stride, offset, g, g_stride, g_offset, token, rows, length,
    columns, width: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Returns the same for the pairs of a block of SUB tokens, in the order of their distance."""
    shape: tl.constexpr = (rows.shape[0], columns.shape[0])
    to_q = tl.zeros(shape, tl.float32)
    to_reader = tl.zeros(shape, tl.float32)
    to_writer = tl.zeros(shape, tl.float32)
    since = tl.zeros(shape, tl.float32)  # decay from the token `distance` before to this one
    until = tl.zeros(shape, tl.float32)  # decay from this token to the one `distance` after
    at = pairs + rows * (C + 1)
    for distance in range(1, SUB):
        since += tile(g, token, g_stride, g_offset, rows - distance + 1, length, columns, width)
        until += tile(g, token, g_stride, g_offset, rows + distance, length, columns, width)
        earlier, later = rows % SUB >= distance, rows % SUB < SUB - distance
        before = tile(k, token, k_stride, offset, rows - distance, length, columns, width) * tl.exp(since)
        before *= tl.gather(f, tl.maximum(rows - distance, 0), 0)[:, None]
        to_q += tl.load(at - distance, mask=earlier, other=0.0)[:, None] * before
        after = tile(q, token, q_stride, offset, rows + distance, length, columns, width) * tl.exp(until)
        after *= tl.gather(reading, tl.minimum(rows + distance, C - 1), 0)[:, None]
        to_writer += tl.load(at + distance * C, mask=later, other=0.0)[:, None] * after
        if DELTA:
            to_reader += tl.load(at + C * C - distance, mask=earlier, other=0.0)[:, None] * before
            after = tile(k, token, k_stride, offset, rows + distance, length, columns, width) * tl.exp(until)
            to_writer += tl.load(at + (C + distance) * C, mask=later, other=0.0)[:, None] * after
    return to_q, to_reader, to_writer


@triton.jit
def block_pairs(
    pairs, reading, f, rq, fk, xk, this, q, k, q_stride, k_stride, offset, g, g_stride, g_offset, token,
    rows, length, columns, width: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns the same for the pairs of a block of SUB tokens, factored from the block's start unless it is steep."""
    inside = from_start(this, SUB)
    if may_factor(inside):
        a, b, c = factored_pairs(
            pairs, rq, fk, xk, tl.exp(inside), tl.exp(-inside), rows, length, SUB, C, DELTA, OPERAND, PRECISION
        )
    else:
        a, b, c = visited_pairs(
            pairs, reading, f, q, k, q_stride, k_stride, offset, g, g_stride, g_offset, token, rows, length,
            columns, width, C, DELTA,
        )  # fmt: skip
    return a, b, c


@triton.jit
def halved_pairs(
    pairs, rq, fk, xk, this, after, rows, length, to_q, to_reader, to_writer, slab, C: tl.constexpr,
    DELTA: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of the pairs in different halves of a block of 2·SUB tokens, of 4·SUB tokens, …, of C."""
    for level in tl.static_range(0, 3):
        if (SUB << level) < C:
            late, early = level_factors(this, after, rows, SUB << level)
            a, b, c = factored_pairs(
                pairs, rq, fk, xk, late, early, rows, length, SUB << (level + 1), C, DELTA, OPERAND, PRECISION
            )
            slab += decay_gradient(rq, fk, xk, a, b, c, SUB << level)
            to_q, to_reader, to_writer = to_q + a, to_reader + b, to_writer + c
    return to_q, to_reader, to_writer, slab


@triton.jit
def decay_gradient(rq, fk, xk, to_q, to_reader, to_writer, M: tl.constexpr):
    """Returns for each token the sum over its segment of M tokens of what later readers read and earlier ones wrote."""
    written = fk * to_writer
    return segment_sums(rq * to_q + xk * to_reader, M, True) + segment_sums(written, M, False) - written


@triton.jit
def sums_before(x, rows, length, PRECISION: tl.constexpr):
    """Returns for each token the sum of x [C, BK] over the tokens before it.

    It is a product, because a cumulative sum minus x would lose the sum where x is larger by far, as at the end of a
    chunk what a token writes to the state is under a steep decay."""
    earlier = tl.where(rows[:, None] > rows[None, :], 1.0, 0.0)
    return isolated_dot(earlier, x, length, tl.float32, PRECISION)


@triton.jit
def write_gradients(
    v, write, d_target, dv, d_write, v_stride, token, h, rows, length, H: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Writes dv and the gradient to the write gate, of a delta rule that has one."""
    gate = numbers(write, token, h, H, rows, length, 1.0)
    d_w = tl.zeros(rows.shape, tl.float32)
    for start in range(0, V, BV):
        values = start + tl.arange(0, BV)
        dp = tile(d_target, token, H * V, h * V, rows, length, values, V)
        d_w += tl.sum(tile(v, token, v_stride, h * V, rows, length, values, V) * dp, 1)
        store_tile(dv, gate[:, None] * dp, token, H * V, h * V, rows, length, values, V)
    store_numbers(d_write, d_w, token, h, H, rows, length)


@triton.jit
def diagonal(x, rows):
    return tl.sum(tl.where(rows[:, None] == rows[None, :], x, 0.0), 1)


@triton.jit
def before_and_after(a, b, rows):
    """Returns for each token t the sum of a_i over i ≥ t and of b_j over j < t, [C]."""
    causal = rows[:, None] >= rows[None, :]
    return tl.sum(tl.where(causal, a[:, None], 0.0), 0) + tl.sum(tl.where(causal, 0.0, b[:, None]), 0)


@triton.jit
def crossing(x, rows, length, PRECISION: tl.constexpr):
    """Returns for each token t the sum of x_ij [C, C] over the pairs j < t ≤ i, [C]."""
    earlier = tl.where(rows[:, None] < rows[None, :], 1.0, 0.0)
    sums = isolated_dot(tl.where(rows[:, None] > rows[None, :], x, 0.0), earlier, length, tl.float32, PRECISION)
    return tl.sum(tl.where(rows[:, None] >= rows[None, :], sums, 0.0), 0)


@triton.jit(do_not_specialize=["T", "q_stride", "k_stride", "v_stride", "g_stride", "e_stride"])
def gradients(
    q, k, v, g, beta, write, read, scores, key_scores, e, states, d_states, d_out, d_target, dq, dk, dv, dg, d_factor,
    d_write, d_read, pairs, cu_seqlens, first_chunk, owner, T, scale, q_stride, k_stride, v_stride, g_stride, e_stride,
    H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, H). Writes dq, dk [tokens, H, K]; dg [tokens, H] or [tokens, H, K]; d_factor (the gradient to f)
    and d_read [tokens, H]; for a delta rule with a write gate also dv and d_write. Skips those that are None. `pairs`
    [chunks, H, 1 (add) or 2 (delta), C, C] is room for R and R2."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    hq = h // (H // HQ)
    q_stride, k_stride, v_stride = q_stride * ALIGN, k_stride * ALIGN, v_stride * ALIGN
    g_stride, e_stride = g_stride * ALIGN, e_stride * ALIGN
    token, length = span(chunk, T, cu_seqlens, first_chunk, owner, PACKED, C)
    if length <= 0:
        return
    rows, place = tl.arange(0, C), chunk.to(tl.int64) * H + h
    reading = scale * numbers(read, token, h, H, rows, length, 1.0)
    f = numbers(beta, token, h, H, rows, length, 1.0)
    if not DELTA:
        f *= numbers(write, token, h, H, rows, length, 1.0)
    R, R2 = pair_gradients(d_out, d_target, e, e_stride, token, h, rows, length, H, V, BV, C, DELTA, OPERAND, PRECISION)
    R = tl.where(rows[:, None] >= rows[None, :], R, 0.0)
    R2 = tl.where(rows[:, None] > rows[None, :], R2, 0.0)
    if DECAY == "vector":
        itself = diagonal(R, rows)[:, None]
        R = tl.where(rows[:, None] > rows[None, :], R, 0.0)
    else:
        high, low = head_sums(g, token, h, H, rows, length, DECAY)
        if dg is not None:
            crossed = R * reading[:, None] * f[None, :] * chunk_matrix(scores, place, rows, C)
            if DELTA:
                crossed += R2 * f[None, :] * chunk_matrix(key_scores, place, rows, C)
            to_decay = crossing(crossed, rows, length, PRECISION)
        decay = pair_decay(high, low, rows)
        R *= decay
        R2 *= decay
    pairs += place * ((1 + DELTA) * C * C)
    store_pairs(pairs, R, R2, rows, C, DELTA)
    if d_write is not None:
        write_gradients(v, write, d_target, dv, d_write, v_stride, token, h, rows, length, H, V, BV)
    d_f = tl.zeros((C,), tl.float32)
    d_r = tl.zeros((C,), tl.float32)
    for start in tl.range(0, K, BK, disable_licm=True):
        keys = start + tl.arange(0, BK)
        xq = tile(q, token, q_stride, hq * K, rows, length, keys, K)
        xk = tile(k, token, k_stride, hq * K, rows, length, keys, K)
        rq, fk = reading[:, None] * xq, f[:, None] * xk
        if DECAY == "vector":
            this, after = channel_decay(g, token, g_stride, h * K, rows, length, keys, K)
            a, b, c = block_pairs(
                pairs, reading, f, rq, fk, xk, this, q, k, q_stride, k_stride, hq * K, g, g_stride, h * K,
                token, rows, length, keys, K, C, DELTA, OPERAND, PRECISION,
            )  # fmt: skip
            slab = segment_sums(rq * a + xk * b - fk * c, SUB, True)
            a, b, c, slab = halved_pairs(
                pairs, rq, fk, xk, this, after, rows, length, a + itself * fk, b, c + itself * rq, slab, C, DELTA,
                OPERAND, PRECISION,
            )  # fmt: skip
        else:
            a, b, c = factored_pairs(pairs, rq, fk, xk, 1.0, 1.0, rows, length, C, C, DELTA, OPERAND, PRECISION)
        to_q, to_reader, to_writer, passing = state_gradients(
            d_out, d_target, e, e_stride, states, d_states, token, place, h, rows, length, keys, H, K, V, BK, BV, C,
            DELTA, OPERAND, PRECISION,
        )  # fmt: skip
        if DECAY == "vector":
            grown = tl.exp(segment_sums(this, C, False))  # from_start would be computed inside the loop over V
            left = tl.exp(to_end(this, after, rows, C))
            to_q, to_reader, to_writer = to_q * grown, to_reader * grown, to_writer * left
            if dg is not None:
                slab += segment_sums(rq * to_q + xk * to_reader, C, True)
                slab += sums_before(fk * to_writer, rows, length, PRECISION)
                slab += (passing * tl.exp(tl.sum(this, 0)))[None, :]
                store_tile(dg, slab, token, H * K, h * K, rows, length, keys, K)
        else:
            seen, left = tl.exp(high)[:, None], left_of(high, low, C)[:, None]
            to_q, to_reader, to_writer = to_q * seen, to_reader * seen, to_writer * left
            if dg is not None:
                at_reader, at_writer = tl.sum(rq * to_q + xk * to_reader, 1), tl.sum(fk * to_writer, 1)
                to_decay += before_and_after(at_reader, at_writer, rows) + tl.exp(last_of(high, C)) * tl.sum(passing, 0)
        to_q, to_reader, to_writer = to_q + a, to_reader + b, to_writer + c
        d_r += scale * tl.sum(xq * to_q, 1)
        d_f += tl.sum(xk * to_writer, 1)
        store_tile(dq, reading[:, None] * to_q, token, H * K, h * K, rows, length, keys, K)
        store_tile(dk, f[:, None] * to_writer + to_reader, token, H * K, h * K, rows, length, keys, K)
    if dg is not None and DECAY != "vector":
        store_numbers(dg, to_decay, token, h, H, rows, length)
    if d_read is not None:
        store_numbers(d_read, d_r, token, h, H, rows, length)
    if d_factor is not None:
        store_numbers(d_factor, d_f, token, h, H, rows, length)
