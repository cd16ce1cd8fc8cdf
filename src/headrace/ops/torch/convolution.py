"""The short convolution in PyTorch."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..sequences import Sequences


def run(conv: nn.Conv1d, x: Tensor, history: Tensor, sequences: Sequences) -> Tensor:
    """Computes the SiLU of the causal depthwise convolution of x [B, T, C] after history [N, W − 1, C]."""
    return sequences.drop_history(F.silu(conv(sequences.extend(x, history).mT).mT), history.shape[1])
