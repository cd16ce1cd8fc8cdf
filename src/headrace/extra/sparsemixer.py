"""The experts of Phi-3.5-MoE (arXiv 2404.14219), whose weights are those of SparseMixer-v2 (GRIN, arXiv 2409.12136).

Dimensions: B batch, T tokens, D hidden size, E experts, c experts per token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..spec.record import NonNegativeFloat
from ..spec.serialize import TYPES
from ..spec.stack import Experts
from .moe import MixtureOfExperts, Routing


@dataclass(frozen=True)
class NearExperts(Experts):
    """A mixture of experts that are chosen one after the other, by the largest logit that is left. The weight of an
    expert with the logit m is its share in a softmax over the logits l that are left and near m: (m - l) / max(|l|, m)
    is at most 2 `near`. Training chooses as evaluation does, without samples."""

    near: NonNegativeFloat = 0.01  # see above

    layer = "headrace.extra.sparsemixer.NearMixture"

    def _objections(self):
        yield from super()._objections()
        for name, usual in (("scores", "softmax"), ("biased", False), ("groups", 1), ("normalized", False)):
            value = getattr(self, name)
            yield value != usual, f"experts.{name}={value} with experts.near, which do not have it; expected {usual}"


class NearMixture(MixtureOfExperts):
    """The layer of NearExperts."""

    spec: Any

    def route(self, x: Tensor) -> tuple[Routing, Tensor]:
        logits, chosen, weights = self.router(x), [], []
        left = logits
        for _ in range(self.spec.chosen):
            best, index = left.max(-1, keepdim=True)
            far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * self.spec.near
            weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index))
            chosen.append(index)
            left = left.scatter(-1, index, -torch.inf)
        return Routing(logits.softmax(-1), torch.cat(chosen, -1)), torch.cat(weights, -1) * self.spec.scale


TYPES["near-experts"] = NearExperts
