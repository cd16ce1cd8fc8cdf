"""The experts of gpt-oss (arXiv 2508.10925): projections and router have biases, and the gated unit has bounds."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.checks import require
from ..spec.record import PositiveFloat
from ..spec.serialize import TYPES
from ..spec.stack import Experts
from .moe import MixtureOfExperts, Router


@dataclass(frozen=True)
class ClampedExperts(Experts):
    """A mixture of experts whose projections and router have biases. An expert's output is W_down ((u + 1) ⊙ g σ(α g)),
    for the gate g = min(W_gate x, c) and u = W_up x within ±c."""

    limit: PositiveFloat = 7.0  # c, bound of the gate from above, and of u
    alpha: PositiveFloat = 1.702  # α, factor of the gate in its sigmoid

    layer = "headrace.extra.clamped.ClampedMixture"


class BiasedRouter(Router):
    """A router with a bias per expert."""

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input)
        return logits + self.bias.to(logits)


class ClampedMixture(MixtureOfExperts):
    """The layer of ClampedExperts."""

    spec: Any
    PARTS = "up", "down", "up_bias", "down_bias"
    no_weight_decay = "up_bias", "down_bias"

    def __init__(self, spec: ClampedExperts, hidden_size: int, width: int, activation: Any, gated: bool, *more: Any):
        require(activation is F.silu, "experts with limit and alpha are gated by a sigmoid; expected mlp='swiglu'")
        super().__init__(spec, hidden_size, width, activation, gated, *more)
        self.router = BiasedRouter(hidden_size, spec.count)
        self.up_bias, self.down_bias = (nn.Parameter(torch.zeros(x.shape[:2])) for x in (self.up, self.down))

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """Also sets the experts' biases to 0."""
        super().reset_parameters(std)
        for name in self._parameters.keys() & {*self.no_weight_decay}:
            getattr(self, name).zero_()

    def _expert(self, x: Tensor, *weights: Tensor) -> Tensor:
        up, down, up_bias, down_bias = weights
        gate, value = F.linear(x, up, up_bias).chunk(2, -1)
        gate, value = gate.clamp(max=self.spec.limit), value.clamp(-self.spec.limit, self.spec.limit)
        return F.linear((value + 1) * gate * torch.sigmoid(self.spec.alpha * gate), down, down_bias)


TYPES["clamped-experts"] = ClampedExperts
