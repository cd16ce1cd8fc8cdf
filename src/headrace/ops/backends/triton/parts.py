"""Device functions that all kernels share: spans of chunks, loads of tiles, and the decay inside a chunk.

Arguments of all kernels: H value heads, HQ heads of q and k, dimensions K and V in blocks of BK and BV, C tokens per
chunk. A tile is [C, ·], one head of the tokens of one chunk; its rows past the end of a sequence are zero.
Per-token tensors are [tokens, heads, ·] with a stride between tokens, which are counted through all rows of the batch.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

SUB: tl.constexpr = tl.constexpr(16)  # tokens per block of a vector decay


@triton.jit
def span(chunk, T, cu_seqlens, first_chunk, owner, PACKED: tl.constexpr, C: tl.constexpr):
    """Returns (first token, number of tokens) of a chunk; the number is at most 0 for a place that no chunk uses."""
    if PACKED:
        n = tl.load(owner + chunk)
        begin = tl.load(cu_seqlens + n).to(tl.int64) + (chunk - tl.load(first_chunk + n)).to(tl.int64) * C
        end = tl.load(cu_seqlens + n + 1).to(tl.int64)
    else:
        per_row = tl.cdiv(T, C)
        n = (chunk // per_row).to(tl.int64)
        begin = n * T + (chunk % per_row) * C
        end = (n + 1) * T
    return begin, tl.minimum(end - begin, C).to(tl.int32)


@triton.jit
def sequence(n, T, cu_seqlens, first_chunk, PACKED: tl.constexpr, C: tl.constexpr):
    """Returns (first token, number of tokens, first chunk) of sequence n."""
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - begin).to(tl.int32)
        chunk = tl.load(first_chunk + n).to(tl.int64)
    else:
        begin = n.to(tl.int64) * T
        length = T + 0
        chunk = n.to(tl.int64) * tl.cdiv(T, C)
    return begin, length, chunk


@triton.jit
def inside(rows, length, columns, width: tl.constexpr):
    """Returns the mask of a tile. Columns need none if their blocks, each of a power of two, divide the width."""
    mask = ((rows >= 0) & (rows < length))[:, None]
    if (columns.shape[0] - 1) & width != 0:
        mask &= (columns < width)[None, :]
    return mask


@triton.jit
def tile(x, token, stride, offset, rows, length, columns, width: tl.constexpr):
    """Loads [rows, columns] of a per-token tensor in float32; None for columns that are None."""
    if columns is None:
        result = None
    else:
        base = x + token * stride + offset
        at = rows[:, None] * stride + columns[None, :]
        result = tl.load(base + at, mask=inside(rows, length, columns, width), other=0.0).to(tl.float32)
    return result


@triton.jit
def store_tile(into, x, token, stride, offset, rows, length, columns, width: tl.constexpr):
    base = into + token * stride + offset
    at = rows[:, None] * stride + columns[None, :]
    tl.store(base + at, x.to(into.dtype.element_ty), mask=inside(rows, length, columns, width))


@triton.jit
def numbers(x, token, h, H: tl.constexpr, rows, length, other):
    """Loads one number per token, [C], of a tensor [tokens, H] in float32; `other` for a tensor that is None."""
    if x is None:
        result = tl.full(rows.shape, other, tl.float32)
    else:
        result = tl.load(x + token * H + h + rows * H, mask=rows < length, other=0.0).to(tl.float32)
    return result


@triton.jit
def store_numbers(into, x, token, h, H, rows, length):
    tl.store(into + token * H + h + rows * H, x.to(into.dtype.element_ty), mask=rows < length)


@triton.jit
def matrix(rows, columns, width):
    return rows[:, None] * width + columns[None, :]


@triton.jit
def product(x, y, acc, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Returns acc + x y, with x and y rounded to OPERAND and the sum in float32."""
    return tl.dot(x.to(OPERAND), y.to(OPERAND), acc, input_precision=PRECISION)


@triton.jit
def isolated_dot(x, y, length, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Returns x y for length > 0, on NVIDIA's GPUs in a branch that is always taken.

    If another product follows from one of 64 rows, Triton divides both by rows, which are too few for eight warps: half
    of them compute what the other half does. It looks for others in the same branch only."""
    result = tl.zeros((x.shape[0], y.shape[1]), tl.float32)
    if is_hip():
        result = product(x, y, result, OPERAND, PRECISION)
    else:
        if length > 0:
            result = product(x, y, result, OPERAND, PRECISION)
    return result


@triton.jit
def finite(log_decay):
    """Bounds a logarithm from below, because −∞ would give NaN differences of sums."""
    return tl.maximum(log_decay, -1000.0, propagate_nan=tl.PropagateNan.ALL)


# --- one decay per head: no decay, fixed, scalar ---------------------------------------------------------------------


@triton.jit
def head_sums(g, token, h, H, rows, length, DECAY: tl.constexpr):
    """Returns the sums G [C] of log_decay up to each token, as high + low in float32.

    The sums are float64, and a difference of two is exact in its leading digits: (high − high) + (low − low).
    """
    if DECAY == "fixed":
        each = finite(tl.load(g + h).to(tl.float64))
        G = (tl.minimum(rows, length - 1) + 1).to(tl.float64) * each
    elif DECAY == "scalar":
        each = tl.load(g + token * H + h + rows * H, mask=rows < length, other=0.0)
        G = tl.cumsum(finite(each.to(tl.float64)), 0)
    else:
        G = rows.to(tl.float64) * 0.0
    high = G.to(tl.float32)
    return high, (G - high.to(tl.float64)).to(tl.float32)


@triton.jit
def last_of(x, C: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0), 0)


@triton.jit
def left_of(high, low, C: tl.constexpr):
    """Returns the decay e^{G_C − G_i} from each token to the end of the chunk."""
    return tl.exp((last_of(high, C) - high) + (last_of(low, C) - low))


@triton.jit
def pair_decay(high, low, rows):
    """Returns e^{G_i − G_j} for j ≤ i, and zero elsewhere, [C, C]."""
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    causal = rows[:, None] >= rows[None, :]
    return tl.where(causal, tl.exp(tl.where(causal, difference, 0.0)), 0.0)


# --- a decay per key channel -----------------------------------------------------------------------------------------


@triton.jit
def segment_sums(x, M: tl.constexpr, REVERSE: tl.constexpr):
    """Returns the cumulative sums of x [C, BK] over the tokens of each segment of M tokens."""
    y = tl.reshape(x, (x.shape[0] // M, M, x.shape[1]))
    return tl.reshape(tl.cumsum(y, 1, reverse=REVERSE), (x.shape[0], x.shape[1]))


@triton.jit
def channel_decay(g, token, stride, offset, rows, length, columns, width: tl.constexpr):
    """Loads log_decay [C, BK] of each token, and that of the token after it (zero after the last)."""
    this = tile(g, token, stride, offset, rows, length, columns, width)
    after = tile(g, token, stride, offset, rows + 1, length, columns, width)
    return finite(this), finite(after)


@triton.jit
def other_blocks(x, M: tl.constexpr, LATER: tl.constexpr):
    """Returns for each token the sum of x [C, BK] over the earlier or the later blocks of SUB tokens in its segment of
    M tokens. It turns sums within blocks into sums within segments: a cumulative sum for each length of segment would
    take twice as many instructions."""
    blocks: tl.constexpr = x.shape[0] // SUB
    totals = tl.sum(tl.reshape(x, (blocks, SUB, x.shape[1])), 1)
    own, other = tl.arange(0, blocks)[:, None], tl.arange(0, blocks)[None, :]
    counted = (own // (M // SUB) == other // (M // SUB)) & (other > own if LATER else other < own)
    result = tl.sum(tl.where(counted[:, :, None], totals[None, :, :], 0.0), 1)
    return tl.reshape(tl.broadcast_to(result[:, None, :], (blocks, SUB, x.shape[1])), x.shape)


@triton.jit
def from_start(this, M: tl.constexpr):
    """Returns the sum of log_decay from the start of a token's segment of M tokens up to and including the token."""
    result = segment_sums(this, SUB, False)
    if M > SUB:
        result += other_blocks(this, M, False)
    return result


@triton.jit
def may_factor(inside):
    """Whether e^{G_i − G_j} may be factored, given the sums G from the start of a block: into e^40 e^−40 at most."""
    return tl.min(tl.min(inside, 1), 0) >= -40.0


@triton.jit
def to_end(this, after, rows, M: tl.constexpr):
    """Returns the sum of log_decay after a token up to the end of its segment of M tokens: no difference of sums."""
    result = segment_sums(tl.where((rows % SUB != SUB - 1)[:, None], after, 0.0), SUB, True)
    if M > SUB:
        result += other_blocks(this, M, True)
    return result


@triton.jit
def level_factors(this, after, rows, M: tl.constexpr):
    """Returns the factors of the pairs of a token in the second half of a block of 2M tokens and one in its first half.

    e^{G_i − G_j} is the product of the decay from the middle to i and from j to the middle, both at most 1.
    """
    second = (rows // M % 2 == 1)[:, None]
    late = tl.where(second, tl.exp(from_start(this, M)), 0.0)
    early = tl.where(second, 0.0, tl.exp(to_end(this, after, rows, M)))
    return late, early


@triton.jit
def together(rows, M: tl.constexpr):
    """Returns [C, C]: whether two tokens are in the same block of M tokens."""
    return (rows // M)[:, None] == (rows // M)[None, :]
