"""Head competition in PyTorch: scores of each head's own q or k, and log gates of scores.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key dimension per head.
"""

import torch.nn.functional as F
from torch import Tensor

from ..call import accumulator
from ..competition import Activation


def run(heads: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    """Computes the log gate [B, T, H] of q or k, heads [B, T, Hq, K]; weight: [H, K]."""
    return activate(scores(heads, weight), activation)


def scores(heads: Tensor, weight: Tensor) -> Tensor:
    """Computes ⟨x_h, w_h⟩ [B, T, H]."""
    return (heads.repeat_interleave(len(weight) // heads.shape[-2], -2) * weight).sum(-1)


def activate(scores: Tensor, activation: Activation) -> Tensor:
    """Computes the log gates of scores [..., H] in the accumulator's precision."""
    scores = scores.to(accumulator(scores)) / activation.temperature
    log_gate = _activate(scores, activation)
    if not activation.identity:
        return log_gate
    # Computed with the same function, because log(H) may differ in the last bit.
    return log_gate - _activate(scores.new_zeros(scores.shape[-1]), activation)


def _activate(scores: Tensor, activation: Activation) -> Tensor:
    if activation.kind == "sigmoid":
        return F.logsigmoid(scores - activation.offset)
    if activation.kind == "null":
        return F.log_softmax(F.pad(scores, (0, 1)), -1)[..., :-1]
    return F.log_softmax(scores, -1)
