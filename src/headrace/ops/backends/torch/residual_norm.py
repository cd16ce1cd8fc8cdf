"""The sum of the residual stream and a branch with its RMSNorm, in PyTorch."""

import torch.nn.functional as F
from torch import Tensor

from ...residual_norm import ResidualNorm


def run(call: ResidualNorm) -> tuple[Tensor, Tensor]:
    """Returns (s, n)."""
    s = call.x if call.y is None else call.x + call.y
    return s, F.rms_norm(s, call.weight.shape, call.weight, call.eps).to(call.dtype)
