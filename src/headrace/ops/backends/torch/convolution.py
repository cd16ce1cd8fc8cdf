"""The short convolution in PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...modules import is_plain
from ...sequences import Sequences


def run(conv: nn.Conv1d, x: Tensor, history: Tensor, sequences: Sequences) -> Tensor:
    """Computes the SiLU of the causal depthwise convolution of x [B, T, C] after history [N, W − 1, C]."""
    extended = sequences.extend(x, history)
    # PyTorch convolves float64 on a CPU channel by channel, which takes up to ten times as long.
    wide = x.dtype == conv.weight.dtype == torch.float64 and x.device.type == "cpu"
    z = _sum_of_products(conv, extended) if wide and is_plain(conv, nn.Conv1d) else conv(extended.mT).mT
    return sequences.drop_history(F.silu(z), history.shape[1])


def _sum_of_products(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Computes the convolution of x [B, W − 1 + T, C] without padding, [B, T, C]."""
    weight, T = conv.weight[:, 0], x.shape[1] - conv.kernel_size[0] + 1
    z = x[:, :T] * weight[:, 0] + (0 if conv.bias is None else conv.bias)
    for j in range(1, conv.kernel_size[0]):
        z = torch.addcmul(z, x[:, j : j + T], weight[:, j])
    return z
