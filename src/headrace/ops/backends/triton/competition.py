"""The log gates of head competition from scores [C, heads], and the gradient to the scores, in registers. `real`:
[heads], which of them exist."""

import triton
import triton.language as tl


@triton.jit
def log_gates(s, real, offset, KIND: tl.constexpr):
    """Returns a log softmax over the heads, with KIND "null" of one more score of 0, or a log sigmoid of s − offset."""
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
def level(real, offset, KIND: tl.constexpr, IDENTITY: tl.constexpr):
    """Returns what is taken off the log gates, [1, heads]: with IDENTITY those of zero scores, computed as others are,
    because log H may differ in its last bit."""
    found = tl.zeros((1, real.shape[0]), tl.float32)
    if IDENTITY:
        found = tl.where(real[None, :], log_gates(found, real, offset, KIND), 0.0)
    return found


@triton.jit
def slopes(s, d_gates, real, offset, KIND: tl.constexpr, IDENTITY: tl.constexpr, LOG: tl.constexpr):
    """Returns the gradient to the scores from that to the gates, or to their logarithm."""
    found = log_gates(s, real, offset, KIND)
    if not LOG:
        d_gates *= tl.exp(found - level(real, offset, KIND, IDENTITY))
    if KIND == "sigmoid":
        found = d_gates * (1 - tl.exp(found))
    else:
        found = d_gates - tl.exp(found) * tl.sum(d_gates, 1)[:, None]
    return found
