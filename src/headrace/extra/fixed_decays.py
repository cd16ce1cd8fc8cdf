"""The decays of Lightning Attention and of xPos, the same for all tokens.

Dimensions: B batch, T tokens, H heads, K key dimension per head.
"""

import torch
from torch import Tensor

from ..layers.linear.decays import DECAYS, DecayModule
from ..ops.call import accumulator
from ..utils.device import float64, kept


@kept
def slopes(num_heads: int, rate: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    heads = float64(torch.arange(num_heads, device=device))
    return (-rate * torch.exp2(-8 * (heads + 1) / num_heads)).to(dtype).to(device)


@kept
def powers(key_dim: int, offset: float, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    half = key_dim // 2
    zeta = (float64(torch.arange(half, device=device)) / half + offset) / (1 + offset)
    return (zeta.log() / tokens).repeat(2).to(dtype).to(device)


class SlopeDecay(DecayModule):
    """Lightning Attention's decay: log_decay [H] = −rate · 2^(−8 (h + 1) / H), the slopes of ALiBi (arXiv 2501.08313,
    section 2.2). In layer l of L, MiniMax-01 has the rate 1 − l / (L − 1); the default is 1 in all."""

    kind = "slopes"

    def forward(self, x: Tensor) -> Tensor:
        return slopes(self.num_heads, self.spec.rate, accumulator(x), x.device)


class XPosDecay(DecayModule):
    """The decay of xPos: log_decay [B, T, H, K] = log(ζ_i) / 512, with ζ_i = (i / (K/2) + 0.4) / 1.4 for the rotary
    pair of channels i and i + K/2 (arXiv 2212.10554, section 3).

    xPos multiplies q at position n by ζ^{n/512} and k at position m by ζ^{−m/512}, which overflows for long sequences.
    Their product ζ^{(n−m)/512} is a decay. xPos replaces RetNet's decay γ; both together would decay twice."""

    kind = "xpos"
    OFFSET, TOKENS = 0.4, 512

    def forward(self, x: Tensor) -> Tensor:
        log_decay = powers(self.key_dim, self.OFFSET, self.TOKENS, accumulator(x), x.device)
        return log_decay.expand(*x.shape[:2], self.num_heads, -1)


DECAYS.update({decay.kind: decay for decay in (SlopeDecay, XPosDecay)})
