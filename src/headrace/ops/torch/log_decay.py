"""The decays of a layer in PyTorch."""

import torch.nn.functional as F
from torch import Tensor

from ..call import accumulator
from ..log_decay import LogDecay


def run(call: LogDecay) -> Tensor:
    """Returns the logarithm, [B, T, H] or [B, T, H, K]."""
    return KINDS[call.kind](call)


def _sigmoid(call: LogDecay) -> Tensor:
    return call.rate * F.logsigmoid(call.x.to(accumulator(call.x)))


def _softplus(call: LogDecay) -> Tensor:
    assert call.bias is not None and call.log_rate is not None
    dt = step_size(call.x, call.bias)
    return -call.log_rate.to(dt.dtype).exp().view(-1, *[1] * (dt.dim() - 3)) * dt


def step_size(x: Tensor, bias: Tensor) -> Tensor:
    """Returns softplus(x + bias)."""
    acc = accumulator(x)
    return F.softplus(x.to(acc) + bias.to(acc).view(x.shape[2:]))


def _exp(call: LogDecay) -> Tensor:
    assert call.bias is not None
    logits = call.bias.view(call.x.shape[2:]) + call.x
    return -logits.to(accumulator(logits)).exp()


KINDS = {"sigmoid": _sigmoid, "softplus": _softplus, "exp": _exp}
