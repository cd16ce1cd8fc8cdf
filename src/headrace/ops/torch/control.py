"""The decays and write strengths of a layer in PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import accumulator
from ..control import Control


def run(call: Control) -> Tensor:
    """Returns y, [B, T, H] or [B, T, H, K]."""
    return KINDS[call.kind](call)


def _sigmoid(call: Control) -> Tensor:
    return call.rate * F.logsigmoid(call.x.to(accumulator(call.x)))


def _softplus(call: Control) -> Tensor:
    assert call.bias is not None and call.log_rate is not None
    dt = step_size(call.x, call.bias)
    return -call.log_rate.to(dt.dtype).exp().view(-1, *[1] * (dt.dim() - 3)) * dt


def step_size(x: Tensor, bias: Tensor) -> Tensor:
    """Returns softplus(x + bias)."""
    acc = accumulator(x)
    return F.softplus(x.to(acc) + bias.to(acc).view(x.shape[2:]))


def _exp(call: Control) -> Tensor:
    assert call.bias is not None
    logits = call.bias.view(call.x.shape[2:]) + call.x
    return -logits.to(accumulator(logits)).exp()


def _beta(call: Control) -> Tensor:
    return torch.sigmoid(call.x.to(accumulator(call.x)))


KINDS = {"sigmoid": _sigmoid, "softplus": _softplus, "exp": _exp, "beta": _beta}
