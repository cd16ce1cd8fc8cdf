"""The first kernel of the forward and of the backward: the C×C matrices inside each chunk, for all chunks at once.

    scores(q, k)_ij = Σ_c q_ic k_jc e^{G_ic − G_jc}   for j ≤ i
    delta rule:       inverse = (I + A β)⁻¹,   A = scores(k, k) below its diagonal

A decay per key channel is applied to q and k here, once: rows(q), rows(k), cols(k) and end are what `scan` multiplies.
"""

import triton
import triton.language as tl

from .parts import (
    SUB,
    channel_decay,
    from_start,
    head_sums,
    isolated_dot,
    level_factors,
    matrix,
    may_factor,
    numbers,
    pair_decay,
    product,
    span,
    store_tile,
    tile,
    to_end,
    together,
)


@triton.jit
def block_scores(x, y, y_at, y_stride, offset, this, g, g_stride, g_offset, token, rows, length, columns,
                 width: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Returns the scores of pairs in the same block of SUB tokens, under a decay per channel.

    Under a decay that is not steep, e^{G_i − G_j} is the product of e^{G_i} and e^{−G_j} from the start of the block.
    Else the pairs are visited by their distance, and their decay is summed on the way.
    """
    inside = from_start(this, SUB)
    near = together(rows, SUB) & (rows[:, None] >= rows[None, :])
    scores = tl.zeros((x.shape[0], x.shape[0]), tl.float32)
    if may_factor(inside):
        result = product(x * tl.exp(inside), tl.trans(y * tl.exp(-inside)), scores, OPERAND, PRECISION)
        scores = tl.where(near, result, 0.0)
    else:
        passed = tl.zeros(x.shape, tl.float32)
        for distance in range(SUB):
            other = tile(y_at, token, y_stride, offset, rows - distance, length, columns, width)
            dots = tl.sum(x * other * tl.exp(passed), 1)
            scores += tl.where(near & (rows[:, None] - rows[None, :] == distance), dots[:, None], 0.0)
            passed += tile(g, token, g_stride, g_offset, rows - distance, length, columns, width)
    return scores


@triton.jit
def invert(N, rows, length, C: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (I + N)⁻¹ of N [C, C], which is zero on and above the diagonal.

    The inverse of a block of 2M tokens comes from the inverses of its halves. All intermediate values are inverses of
    blocks, which stay bounded where powers of N do not, as for a repeated key."""
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    M = 1
    while M < C:
        half, whole = rows // M, rows // (2 * M)
        corner = (half[:, None] == half[None, :] + 1) & (whole[:, None] == whole[None, :])
        below = isolated_dot(tl.where(corner, N, 0.0), inverse, length, tl.float32, PRECISION)
        inverse -= tl.dot(inverse, below, input_precision=PRECISION)
        M *= 2
    return inverse


@triton.jit(do_not_specialize=["T", "q_stride", "k_stride", "g_stride"])
def prepare(
    q, k, g, beta, scores, key_scores, inverse, q_rows, k_rows, k_cols, end, cu_seqlens, first_chunk, owner, T,
    q_stride, k_stride, g_stride,
    H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    DELTA: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, H). Writes scores [chunks, H, C, C]; for the delta rule inverse and, unless it is None, key_scores
    (A) of the same shape; for a decay per channel q_rows, k_cols and, for the delta rule, k_rows [tokens, H, K], and
    end [chunks, H, K]."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    hq = h // (H // HQ)
    q_stride, k_stride, g_stride = q_stride * ALIGN, k_stride * ALIGN, g_stride * ALIGN
    token, length = span(chunk, T, cu_seqlens, first_chunk, owner, PACKED, C)
    if length <= 0:
        return
    rows = tl.arange(0, C)
    qk = tl.zeros((C, C), tl.float32)
    kk = tl.zeros((C, C), tl.float32)
    for start in range(0, K, BK):
        columns = start + tl.arange(0, BK)
        xq = tile(q, token, q_stride, hq * K, rows, length, columns, K)
        xk = tile(k, token, k_stride, hq * K, rows, length, columns, K)
        if DECAY == "vector":
            this, after = channel_decay(g, token, g_stride, h * K, rows, length, columns, K)
            qk += block_scores(xq, xk, k, k_stride, hq * K, this, g, g_stride, h * K, token, rows, length, columns, K,
                               OPERAND, PRECISION)  # fmt: skip
            if DELTA:
                kk += block_scores(xk, xk, k, k_stride, hq * K, this, g, g_stride, h * K, token, rows, length, columns,
                                   K, OPERAND, PRECISION)  # fmt: skip
            grown = tl.exp(from_start(this, C))
            store_tile(q_rows, xq * grown, token, H * K, h * K, rows, length, columns, K)
            store_tile(k_cols, xk * tl.exp(to_end(this, after, rows, C)), token, H * K, h * K, rows, length, columns, K)
            if DELTA:
                store_tile(k_rows, xk * grown, token, H * K, h * K, rows, length, columns, K)
            tl.store(end + (chunk.to(tl.int64) * H + h) * K + columns, tl.exp(tl.sum(this, 0)), mask=columns < K)
            for level in tl.static_range(0, 3):
                if (SUB << level) < C:
                    late, early = level_factors(this, after, rows, SUB << level)
                    near = together(rows, SUB << (level + 1))
                    earlier = tl.trans(xk * early)
                    zero = tl.zeros((C, C), tl.float32)
                    qk += tl.where(near, product(xq * late, earlier, zero, OPERAND, PRECISION), 0.0)
                    if DELTA:
                        kk += tl.where(near, product(xk * late, earlier, zero, OPERAND, PRECISION), 0.0)
        else:
            qk = product(xq, tl.trans(xk), qk, OPERAND, PRECISION)
            if DELTA:
                kk = product(xk, tl.trans(xk), kk, OPERAND, PRECISION)
    causal = rows[:, None] >= rows[None, :]
    if DECAY == "fixed" or DECAY == "scalar":
        high, low = head_sums(g, token, h, H, rows, length, DECAY)
        decay = pair_decay(high, low, rows)
        qk *= decay
        kk *= decay
    at = (chunk.to(tl.int64) * H + h) * C * C + matrix(rows, rows, C)
    tl.store(scores + at, tl.where(causal, qk, 0.0).to(scores.dtype.element_ty))
    if DELTA:
        kk = tl.where(rows[:, None] > rows[None, :], kk, 0.0)
        if key_scores is not None:
            tl.store(key_scores + at, kk.to(key_scores.dtype.element_ty))
        strength = numbers(beta, token, h, H, rows, length, 1.0)
        tl.store(inverse + at, invert(kk * strength[None, :], rows, length, C, PRECISION).to(inverse.dtype.element_ty))
