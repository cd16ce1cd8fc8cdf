"""A mixture of experts in place of an MLP (arXiv 2101.03961): a router chooses a few of many MLPs for every token.

Dimensions: B batch, T tokens, D hidden size, W width of an expert, E experts, c experts per token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.call import accumulator
from ...spec.stack import Experts
from ..base import SelfInitialised
from .widths import default_std


class Routing(NamedTuple):
    """The decisions of a router."""

    shares: Tensor  # [B, T, E], probabilities of the experts
    chosen: Tensor  # [B, T, c], indices of the chosen experts


class MixtureOfExperts(SelfInitialised):
    """Sum of the chosen experts' outputs, weighted with their probabilities. Experts have no capacity limit, so that no
    token is dropped. In training, `routing` holds the routing of the last forward, for `balance_loss`.

    Args:
        spec: number of experts, and number of experts per token.
        hidden_size: D.
        width: W.
        activation: activation of an expert.
        gated: whether the activation multiplies a second projection, as in SwiGLU.
    """

    routing: Routing | None

    def __init__(
        self, spec: Experts, hidden_size: int, width: int, activation: Callable[[Tensor], Tensor], gated: bool
    ):
        super().__init__()
        self.spec, self.activation, self.gated, self.routing = spec, activation, gated, None
        self.router = nn.Linear(hidden_size, spec.count, bias=False)
        self.up = nn.Parameter(torch.empty(spec.count, (1 + gated) * width, hidden_size))
        self.down = nn.Parameter(torch.empty(spec.count, hidden_size, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """std: standard deviation of the experts' initial weights; None: `layers.widths.default_std`."""
        for weight in (self.up, self.down):
            weight.normal_(std=default_std(self.up.shape[-1]) if std is None else std)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        shares = self.router(x).softmax(-1, dtype=accumulator(x))
        weights, chosen = shares.topk(self.spec.chosen, -1)
        self.routing = Routing(shares, chosen) if self.training else None
        # The (token, expert) pairs are sorted by expert, so that the tokens of an expert are contiguous.
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        tokens = order // self.spec.chosen
        # Not bincount, whose output size is unknown to torch.compile.
        counts = flat.new_zeros(self.spec.count).index_add(0, flat, torch.ones_like(flat))
        # The meta device only counts operations, whose number does not depend on the distribution over experts.
        sizes = [len(flat), *[0] * (self.spec.count - 1)] if x.is_meta else counts.tolist()
        parts = x.flatten(0, 1)[tokens].split(sizes)
        out = torch.cat([self._expert(*each) for each in zip(parts, self.up.unbind(), self.down.unbind(), strict=True)])
        out = out * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).flatten(0, 1).index_add(0, tokens, out).view_as(x)

    def _expert(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = F.linear(x, up)
        if self.gated:
            gate, value = hidden.chunk(2, -1)
            return F.linear(self.activation(gate) * value, down)
        return F.linear(self.activation(hidden), down)


def balance_loss(routing: Routing, mask: Tensor | None = None) -> Tensor:
    """Returns the load-balancing loss E Σ_e f_e P_e (arXiv 2101.03961, equation 4).

    f_e is the fraction of tokens that chose expert e, P_e its mean probability. The loss is c for a uniform load. mask
    [B, T]: False marks padding, which is ignored."""
    shares, chosen = (x.flatten(0, 1) if mask is None else x[mask] for x in routing)
    often = F.one_hot(chosen, shares.shape[-1]).sum(1).to(shares.dtype)
    return shares.shape[-1] * (often.mean(0) * shares.mean(0)).sum()


def routings(model: nn.Module) -> list[Routing]:
    """Returns the routings of a model's last forward in training, and removes them from the modules."""
    collected = []
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and module.routing is not None:
            collected.append(module.routing)
            module.routing = None
    return collected
