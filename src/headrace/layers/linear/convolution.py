"""The short convolution of a mixer: a causal depthwise convolution and, in most mixers, SiLU.

Dimensions: B batch, T tokens, C channels, N sequences, W width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.backends.native import convolution as native
from ...ops.backends.triton import convolution as triton
from ...ops.backends.triton import elementwise
from ...ops.backends.triton.limits import chosen
from ...ops.modules import is_plain
from ...ops.sequences import Sequences
from .stage import Stage, Tokens


class Convolve(Stage):
    """The short convolution of q, k and v, with SiLU."""

    field = "inputs.conv"
    kinds = ()

    def build(self, mixer: Any) -> None:
        inputs, channels = mixer.spec.inputs, sum(mixer.parts.values())
        mixer.conv = nn.Conv1d(channels, channels, inputs.conv, groups=channels, bias=inputs.conv_bias)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        x = t.parts.pop("qkv") if "qkv" in t.parts else torch.cat([t.parts[name] for name in "qkv"], -1)
        x, t.next["conv"] = convolve(mixer.conv, x, t.before("conv"), t.sequences, mixer.backend, in_place=t.in_place)
        t.parts |= dict(zip("qkv", x.split([mixer.parts[name] for name in "qkv"], -1), strict=True))


def convolve(
    conv: nn.Conv1d, x: Tensor, history: Tensor | None, sequences: Sequences, backend: str = "auto", silu: bool = True,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes SiLU(conv(x)) or conv(x) for x [B, T, C] -> (y [B, T, C], the next history).

    Args:
        conv: the weights; its padding is not used.
        history: [N, W − 1, C], the tokens before x; None: zeros.
        sequences: the sequences of x.
        backend: "auto" and "native" take the native library, "auto" and "triton" take Triton where there is no history
            or one token without gradients follows it, if these can compute it; otherwise PyTorch does.
        silu: whether SiLU follows.
        in_place: whether the history may be overwritten.
    """
    if sequences.borders is None and chosen(backend, x) and triton.unsupported_reason(conv, x) is None:
        if history is None:
            return triton.convolve(x, conv.weight, conv.bias, sequences.cu_seqlens, silu)
        one = x.shape[1] == 1 and not sequences.packed and not torch.is_grad_enabled()
        if one and elementwise.computes(backend, x):
            return triton.convolve_token(x, conv.weight, conv.bias, history, silu, in_place)
    history = sequences.before(x, history, conv.weight.shape[2] - 1)
    if silu and backend in ("auto", "native") and native.unsupported_reason(conv, x) is None:
        y = native.convolve(x, conv.weight, conv.bias, history, sequences.cu_seqlens)
    else:
        y = _by_pytorch(conv, x, history, sequences)
        y = F.silu(y) if silu else y
    return y, sequences.last(x, history)


def _by_pytorch(conv: nn.Conv1d, x: Tensor, history: Tensor, sequences: Sequences) -> Tensor:
    extended = sequences.extend(x, history)
    # PyTorch convolves float64 on a CPU channel by channel, which takes up to ten times as long.
    wide = x.dtype == conv.weight.dtype == torch.float64 and x.device.type == "cpu"
    z = _sum_of_products(conv, extended) if wide and is_plain(conv, nn.Conv1d) else conv(extended.mT).mT
    return sequences.drop_history(z, history.shape[1])


def _sum_of_products(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Computes the convolution of x [B, W − 1 + T, C] without padding, [B, T, C]."""
    weight, T = conv.weight[:, 0], x.shape[1] - conv.kernel_size[0] + 1
    z = x[:, :T] * weight[:, 0] + (0 if conv.bias is None else conv.bias)
    for j in range(1, conv.kernel_size[0]):
        z = torch.addcmul(z, x[:, j : j + T], weight[:, j])
    return z
