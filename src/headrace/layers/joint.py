"""Which of its memories a head reads, where it has several: a joint gate of low rank.

The softmax over all (q, k) is a joint distribution, of which head competition takes the product of two marginals,
G^Q_h(q_t) G^K_h(k_s): as a table over q and k it has rank 1 for every head. With R memories per head, which all compete
for what is written, and a distribution over those of a head when it is read, what was written at s weighs at t

    P(h | q_t, k_s) ∝ G^Q_h(q_t) Σ_r P(r | h, q_t) G^K_{h,r}(k_s)

This has rank R, is still a recurrence, and with enough memories is any joint gate. It costs R times the memory and
the time of the op, and 2 R H K weights in place of H K for what is written. All memories begin with the same gate and
so hold the same, and whatever the distribution over them, the layer begins as its backbone; that they are read unlike
each other is what lets them part.

Dimensions: B batch, T tokens, H heads (Hq for q and k), R memories per head, K key dimension.
"""

import math

import torch
from torch import Tensor, nn

from ..ops.call import accumulator
from .parts import Gate


class MemoryChoice(Gate):
    """P(r | h, q_t) = softmax over r of ⟨q_h, w_{h,r}⟩. The weights draw no random numbers: they are cosines."""

    def __init__(self, rank: int, num_heads: int, key_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, rank, key_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        _, R, K = self.weight.shape
        angle = math.pi / K * torch.outer(torch.arange(R), torch.arange(K) + 0.5)
        self.weight.copy_(angle.cos() * math.sqrt(2 / K))

    def forward(self, q: Tensor) -> Tensor:
        """q [B, T, Hq, K], as the competition reads it -> [B, T, H R], memories of a head together."""
        q = q.repeat_interleave(len(self.weight) // q.shape[2], 2)
        scores = torch.einsum("bthk,hrk->bthr", q, self.weight)
        return scores.to(accumulator(q)).softmax(-1).flatten(2)
