"""The kernel of the loss: cross-entropies of logits, and their gradients in place of the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 8192  # logits of a row that a program holds at a time


@triton.jit
def errors(logits, labels, losses, V, ignored, WIDTH: tl.constexpr):
    """Grid: (N,). Writes losses [N], and softmax − one-hot label over logits [N, V]; zeros for an ignored label.

    One pass finds the largest logit and the sum of exponentials, scaled whenever a larger logit is found; a second one
    writes. Sums are in float32."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    label = tl.load(labels + row)
    largest, total = -3e38, 0.0  # not −∞, as −∞ less −∞, of logits that are all −∞ so far, is NaN
    for start in range(0, V, WIDTH):
        at = start + tl.arange(0, WIDTH)
        x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        largest = new
    normalizer = largest + tl.log(total)
    kept = label != ignored
    target = tl.load(logits + label, mask=kept, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(kept, normalizer - target, 0.0))
    for start in range(0, V, WIDTH):
        at = start + tl.arange(0, WIDTH)
        x = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32)
        error = tl.exp(x - normalizer) - tl.where(at == label, 1.0, 0.0)
        tl.debug_barrier()  # no thread overwrites what another one has to load
        tl.store(logits + at, tl.where(kept, error, 0.0).to(logits.dtype.element_ty), mask=at < V)


def loss_and_errors(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Returns (the sum of the cross-entropies of logits [N, V] and labels [N], its gradient to the logits).

    The gradient is written over the logits. Fails on the device for a label that is neither in [0, V) nor `ignored`."""
    (N, V), labels = logits.shape, labels.contiguous()
    valid = ((labels >= 0) & (labels < V)) | (labels == ignored)
    torch._assert_async(valid.all(), f"a label is not ignored ({ignored}) and not one of the {V} of the vocabulary")
    losses = logits.new_empty(N, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        errors[(N,)](logits, labels, losses, V, ignored, WIDTH=min(WIDTH, triton.next_power_of_2(V)), num_warps=16)
    return losses.sum(), logits
