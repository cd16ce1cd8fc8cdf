"""Competition with several memories per head, and with memories that decay only while they are written (`freeze`).

R memories per head (competition.memories_per_head) are a gate of rank R that depends jointly on query and key.

Head competition gates the contribution of token s to token t by the product G^Q_h(q_t) G^K_h(k_s), which has rank 1 as
a function of q_t and k_s. With R memories per head, all of which compete for writes, and a distribution over a head's
memories for each read, the gate is

    P(h | q_t, k_s) ∝ G^Q_h(q_t) Σ_r P(r | h, q_t) G^K_{h,r}(k_s)

This gate has rank R, and the layer is still a recurrence. It multiplies memory and time of `linear_attention` by R, and
has 2 R H K weights in place of H K for writes. Initially all write gates are equal, so that all memories of a head are
equal and the layer equals the mixer without competition; the initial read distributions differ, so that the memories
get different gradients.

Dimensions: B batch, T tokens, H heads (Hq for q and k), R memories per head, K key dimension.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.linear.competition import Gate
from ..layers.linear.stage import STAGES, Stage, Tokens
from ..ops.call import accumulator, product
from ..spec.linear import RULES, MixerSpec


class MemoryChoice(Gate):
    """P(r | h, q_t) = softmax over r of ⟨q_h, w_{h,r}⟩. The initial weights are cosines, without random numbers."""

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
        """q [B, T, Hq, K] after the short convolution -> [B, T, H R], with the memories of a head side by side."""
        q = q.repeat_interleave(len(self.weight) // q.shape[2], 2)
        scores = torch.einsum("bthk,hrk->bthr", q, self.weight)
        return scores.to(accumulator(q)).softmax(-1).flatten(2)


class Memories(Stage):
    """Chooses among the memories of a head, and repeats the head's tensors, but its values, once per memory."""

    def build(self, mixer: Any) -> None:
        mixer.choice = MemoryChoice(mixer.spec.memories_per_head, mixer.H, mixer.K)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        R, choice = mixer.spec.memories_per_head, mixer.choice(t.parts["q"])
        for name in ("log_decay", "dt", "beta", "read_gate"):
            if (y := getattr(t, name)) is not None:
                setattr(t, name, y.repeat_interleave(R, 2 if y.dim() > 2 else 0))
        t.read_gate = product(t.read_gate, choice)


class MemoriesOfValues(Stage):
    """Repeats a head's values once per memory."""

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.v = t.v.repeat_interleave(mixer.spec.memories_per_head, 2)


class SumOfMemories(Stage):
    """Sums what the memories of a head give."""

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.out = t.out.unflatten(2, (mixer.H, -1)).sum(3)


class Freeze(Stage):
    """Keeps a memory whose write gate is 0 from decaying."""

    def __call__(self, mixer: Any, t: Tokens) -> None:
        written = t.write > (-math.inf if mixer.spec.competition.write == "beta" else 0)
        t.log_decay = torch.where(written if t.log_decay.dim() < 4 else written[..., None], t.log_decay, 0)


def rules(spec: MixerSpec) -> Iterator[tuple[bool, str]]:
    """Objections to several memories per head."""
    yield (
        spec.competition is not None and spec.competition.write == "none",
        f"competition.memories_per_head={spec.memories_per_head} with competition.write='none': the memories "
        "of a head would hold the same",
    )


RULES["competition.memories_per_head"] = rules


STAGES.update({
    "memories": Memories, "values-of-memories": MemoriesOfValues, "sum-of-memories": SumOfMemories, "freeze": Freeze,
})  # fmt: skip
