"""A mixture of experts in place of an MLP (arXiv 2101.03961): a router chooses, for every token, a few of many MLPs.

Dimensions: B batch, T tokens, n all of them, D hidden size, W an expert's width, E experts, c those chosen for a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.call import accumulator
from ..spec.stack import Experts
from .parts import SelfInitialised


class Routing(NamedTuple):
    """What a router did."""

    shares: Tensor  # [B, T, E], softmax over experts
    chosen: Tensor  # [B, T, c]


class MixtureOfExperts(SelfInitialised):
    """Σ over the chosen experts of their share times what they make of x. No token is dropped, whatever the load.

    Args:
        activation: of an expert; `gated`: it multiplies a second projection, as in SwiGLU.
    In training `routing` holds what the last forward did, for `balance_loss`.
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
    def reset_parameters(self) -> None:
        for weight in (self.up, self.down):
            weight.normal_(std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        shares = self.router(x).softmax(-1, dtype=accumulator(x))
        weights, chosen = shares.topk(self.spec.chosen, -1)
        self.routing = Routing(shares, chosen) if self.training else None
        # Every (token, expert) pair in the order of experts, so that each of them sees its tokens in one piece.
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        tokens = order // self.spec.chosen
        # Not bincount: under torch.compile the length of what it returns is not known.
        counts = flat.new_zeros(self.spec.count).index_add(0, flat, torch.ones_like(flat))
        # On the meta device, where only work is counted, it is the same however the tokens are spread.
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
    """E Σ_e f_e P_e (arXiv 2101.03961, equation 4): f_e is how often expert e was chosen per token, P_e its mean share.
    It is c where all experts have the same. mask [B, T]: False is padding, which does not count."""
    shares, chosen = (x.flatten(0, 1) if mask is None else x[mask] for x in routing)
    often = F.one_hot(chosen, shares.shape[-1]).sum(1).to(shares.dtype)
    return shares.shape[-1] * (often.mean(0) * shares.mean(0)).sum()


def routings(model: nn.Module) -> list[Routing]:
    """What the routers of a model did in its last forward in training; each is forgotten."""
    found = []
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and module.routing is not None:
            found.append(module.routing)
            module.routing = None
    return found
