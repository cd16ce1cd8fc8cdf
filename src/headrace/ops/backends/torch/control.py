"""The decays and write strengths of a layer in PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...call import accumulator
from ...control import Control

FAR = -40.0  # softplus(z) is e^z to the last digit of a float64 below


def run(call: Control) -> Tensor:
    """Returns y, [B, T, H] or [B, T, H, K]."""
    return KINDS[call.kind](call)


def _sigmoid(call: Control) -> Tensor:
    return call.rate * F.logsigmoid(call.x.to(accumulator(call.x)))


def _softplus(call: Control) -> Tensor:
    assert call.bias is not None and call.log_rate is not None
    z = _biased(call.x, call.bias)
    log_rate = call.log_rate.to(z.dtype).view(-1, *[1] * (z.dim() - 3))
    # e^A softplus(z) = e^(A − d) softplus(z + d) below FAR, where softplus is e^z: a product of two factors of which
    # neither is infinite and the second is never 0. relu and clamp pass the gradient to z at FAR once.
    return -finite_exp(log_rate - F.relu(FAR - z), room=24) * F.softplus(z.clamp(min=FAR))  # its gradient has e^20


def finite_exp(x: Tensor, room: float = 8) -> Tensor:
    """Returns e^x for the rate of a decay, at most e^−room of the dtype's largest number, which is e^88 for float32. A
    memory that decays at a rate of e^60 keeps nothing after one token, and ∞ · 0 would be NaN, also in a gradient."""
    return x.clamp(max=math.log(torch.finfo(x.dtype).max) - room).exp()


def step_size(x: Tensor, bias: Tensor) -> Tensor:
    """Returns softplus(x + bias)."""
    return F.softplus(_biased(x, bias))


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    acc = accumulator(x)
    return x.to(acc) + bias.to(acc).view(x.shape[2:])


def _exp(call: Control) -> Tensor:
    assert call.bias is not None
    logits = call.bias.view(call.x.shape[2:]) + call.x
    return -finite_exp(logits.to(accumulator(logits)))


def _beta(call: Control) -> Tensor:
    return torch.sigmoid(call.x.to(accumulator(call.x)))


KINDS = {"sigmoid": _sigmoid, "softplus": _softplus, "exp": _exp, "beta": _beta}
