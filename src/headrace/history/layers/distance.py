"""T5's relative position bias."""

import math

import torch
from torch import Tensor, nn

from ...layers.base import SelfInitialized

FURTHEST = 128  # as in T5: all longer distances share one bucket


def bucket(distance: Tensor, buckets: int, *, bidirectional: bool = False) -> Tensor:
    """Returns T5's bucket of the distance from key to query in tokens (arXiv 1910.10683, section 2.1).

    The first half of the buckets are single distances; the others grow logarithmically up to FURTHEST. Negative
    distances count as 0, or have half of all buckets if attention is bidirectional."""
    offset: Tensor | int = 0
    if bidirectional:
        buckets //= 2
        offset, distance = buckets * (distance < 0), distance.abs()
    distance, exact = distance.clamp(min=0), buckets // 2
    # Float32, as in the training of the published weights: float64 would change the bucket of some distances.
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(FURTHEST / exact)
    wide = exact + (ratio * (buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, wide.clamp(max=buckets - 1))


class DistanceBias(SelfInitialized):
    """T5's relative position bias: a learned number per bucket and head, added to the logits."""

    def __init__(self, buckets: int, num_heads: int, *, hidden_size: int, bidirectional: bool = False):
        super().__init__()
        self.buckets, self.std, self.bidirectional = buckets, hidden_size**-0.5, bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_(std=self.std)

    def forward(self, distance: Tensor) -> Tensor:
        """distance [B, T, L] from key to query in tokens -> bias [B, H, T, L]."""
        return self.weight[bucket(distance, self.buckets, bidirectional=self.bidirectional)].movedim(-1, 1)
