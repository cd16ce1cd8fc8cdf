"""Head competition in PyTorch: scores of each head's own q or k, and gates of scores.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key dimension per head.
"""

import torch.nn.functional as F
from torch import Tensor

from ...call import accumulator
from ...query_key import Activation


def scores(heads: Tensor, weight: Tensor) -> Tensor:
    """Computes ⟨x_h, w_h⟩ [B, T, H]."""
    return (heads[..., None, :] * weight.unflatten(0, (heads.shape[-2], -1))).sum(-1).flatten(-2)


def activate(scores: Tensor, activation: Activation) -> Tensor:
    """Computes the gates of scores [..., H], or their logarithm, in the accumulator's precision."""
    scores = scores.to(accumulator(scores)) / activation.temperature
    log_gate = _activate(scores, activation)
    if activation.identity:  # computed with the same function, because log(H) may differ in the last bit
        log_gate = log_gate - _activate(scores.new_zeros(scores.shape[-1]), activation)
    return log_gate if activation.log else log_gate.exp()


def _activate(scores: Tensor, activation: Activation) -> Tensor:
    if activation.kind == "sigmoid":
        return F.logsigmoid(scores - activation.offset)
    if activation.kind == "null":
        return F.log_softmax(F.pad(scores, (0, 1)), -1)[..., :-1]
    return F.log_softmax(scores, -1)
