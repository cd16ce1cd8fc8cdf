"""Where a token stands, beside rotation (parts.py): the sinusoids that are added to embeddings, and T5's learned bias
for each distance."""

import math

import torch
from torch import Tensor, nn

from ..parts import SelfInitialised

FURTHEST = 128  # T5's: all longer distances share one bucket


def sinusoidal(positions: Tensor, width: int, theta: float = 10000.0) -> Tensor:
    """[...] -> [..., width]: channels 2i and 2i+1 are sine and cosine of position / theta^(2i/width) (arXiv 1706.03762,
    section 3.5). Float64 angles, float32 result."""
    frequency = theta ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width)
    angle = positions[..., None].double() * frequency
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width].float()


def bucket(distance: Tensor, buckets: int, furthest: int = FURTHEST, *, bidirectional: bool = False) -> Tensor:
    """T5's bucket of how many tokens before the query a key stands (arXiv 1910.10683, section 2.1): one for each short
    distance, then wider and wider ones up to `furthest`. The future is distance 0, or has half of the buckets to itself
    where attention is bidirectional."""
    offset: Tensor | int = 0
    if bidirectional:
        buckets //= 2
        offset, distance = buckets * (distance < 0), distance.abs()
    distance, exact = distance.clamp(min=0), buckets // 2
    # Float32, as where the published weights were trained: in float64 some distances would change their bucket.
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(furthest / exact)
    wide = exact + (ratio * (buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, wide.clamp(max=buckets - 1))


class DistanceBias(SelfInitialised):
    """A learned number for each bucket of distances and head, added to the logits."""

    def __init__(self, buckets: int, num_heads: int, *, hidden_size: int, bidirectional: bool = False):
        super().__init__()
        self.buckets, self.std, self.bidirectional = buckets, hidden_size**-0.5, bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_(std=self.std)

    def forward(self, distance: Tensor) -> Tensor:
        """[B, T, L], keys' tokens before the query -> [B, H, T, L]."""
        return self.weight[bucket(distance, self.buckets, bidirectional=self.bidirectional)].movedim(-1, 1)
