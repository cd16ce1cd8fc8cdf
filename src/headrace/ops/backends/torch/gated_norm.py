"""The gated norm in PyTorch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...call import accumulator
from ...gated_norm import GatedNorm

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def run(call: GatedNorm) -> Tensor:
    """Returns y [B, T, H, V]."""
    return around(normalise, call)


def around(norm: Callable[[Tensor, GatedNorm], Tensor], call: GatedNorm) -> Tensor:
    """Computes the gated norm with another function as its norm."""
    x, gate = call.x, None if call.logits is None else GATES[call.gate](call.logits)
    if gate is not None and call.order == "gate-norm":
        x = x * gate
    x = norm(x, call)
    x = x if call.strength is None else x * call.strength[..., None].to(x.dtype)
    return x * gate if gate is not None and call.order == "norm-gate" else x


def normalise(x: Tensor, call: GatedNorm) -> Tensor:
    """Applies the norm of a call to x [B, T, H, V], in the accumulator's precision."""
    if call.weight is None:
        return x
    wide, weight = x.to(accumulator(x)), call.weight
    if call.norm == "rms":
        return F.rms_norm(wide, x.shape[-1:], weight.to(wide.dtype), call.eps).to(x.dtype)
    if call.norm == "rms-joint":
        return F.rms_norm(wide.flatten(-2), weight.shape, weight.to(wide.dtype), call.eps).view_as(wide).to(x.dtype)
    assert call.norm == "group" and call.bias is not None
    centred = F.layer_norm(wide, x.shape[-1:], eps=call.eps)
    return (centred * weight.view(x.shape[-2:]) + call.bias.view(x.shape[-2:])).to(x.dtype)
