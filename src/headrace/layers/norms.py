"""Norms that PyTorch lacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.call import accumulator


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma, arXiv 2403.08295). In bfloat16 a weight near 0 has more digits than
    one near 1."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        wide = x.to(accumulator(x))
        return F.rms_norm(wide, self.normalized_shape, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)
