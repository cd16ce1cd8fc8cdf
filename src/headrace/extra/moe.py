"""A mixture of experts in place of an MLP (arXiv 2101.03961): a router chooses a few of many MLPs for every token.

Dimensions: B batch, T tokens, D hidden size, W width of an expert, E experts, c experts per token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.base import SelfInitialized
from ..layers.blocks.widths import default_std
from ..ops.call import accumulator
from ..spec.stack import MLPS, Experts
from ..utils.device import without_autocast


class Routing(NamedTuple):
    """The decisions of a router."""

    shares: Tensor  # [B, T, E], scores of the experts, which sum to 1
    chosen: Tensor  # [B, T, c], indices of the chosen experts
    graded: bool = True  # whether the router was computed with gradients enabled

    def balance_loss(self, mask: Tensor | None = None) -> Tensor:
        """Returns the load-balancing loss E Σ_e f_e P_e (arXiv 2101.03961, equation 4).

        f_e is the fraction of tokens that chose expert e, P_e its mean probability. The loss is c for a uniform load.
        mask [B, T]: False marks padding, which is ignored; the loss of no token is 0."""
        shares, chosen = (x.flatten(0, 1) if mask is None else x[mask] for x in self[:2])
        often = F.one_hot(chosen, shares.shape[-1]).sum(1).to(shares.dtype)
        often, shares = (x.sum(0) / max(len(x), 1) for x in (often, shares))
        return len(shares) * (often * shares).sum()


class Router(nn.Linear):
    """A linear layer that computes in float32, or in float64: a logit that is rounded may choose another expert."""

    def forward(self, input: Tensor) -> Tensor:
        acc = accumulator(input)
        with without_autocast(input):
            return F.linear(input.to(acc), self.weight.to(acc))


class MixtureOfExperts(SelfInitialized):
    """Sum of the chosen experts' outputs, weighted with their scores. Experts have no capacity limit, so that no token
    is dropped. In training, `routing` holds the routing of the last forward, for its loss.

    The options of the router are those of Mixtral (arXiv 2401.04088) and DeepSeek-V3 (2412.19437, section 2.1.2), the
    experts on a projection of the token those of Nemotron-H.

    Args:
        spec: the experts, and how a token chooses among them.
        hidden_size: D.
        width: W, unless the spec sets it.
        activation: activation of an expert.
        gated: whether the activation multiplies a second projection, as in SwiGLU.
        shared: the MLP of all tokens, if the spec has one.
        bias: whether the projections to and from the experts' input, if the spec has them, have biases.
    """

    routes = True
    PARTS: tuple[str, ...] = ("up", "down")  # parameters that have a row for each expert

    def __init__(
        self, spec: Experts, hidden_size: int, width: int, activation: Callable[[Tensor], Tensor], gated: bool,
        shared: nn.Module | None = None, bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.spec, self.activation, self.gated = spec, activation, gated
        self.routing: Routing | None = None
        size, width = spec.latent or hidden_size, spec.width or width
        self.router = Router(hidden_size, spec.count, bias=False)
        self.choice_bias: Any
        self.register_buffer("choice_bias", torch.zeros(spec.count) if spec.biased else None)
        self.shared: Any = shared
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if spec.shared_gate else None
        self.inner = self.outer = None
        if spec.latent is not None:
            self.inner, self.outer = nn.Linear(hidden_size, size, bias=bias), nn.Linear(size, hidden_size, bias=bias)
        self.up = nn.Parameter(torch.empty(spec.count, (1 + gated) * width, size))
        self.down = nn.Parameter(torch.empty(spec.count, size, width))
        self.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"routing": None}  # what belongs to a graph has no copy

    def initialize(self, std: float | None) -> None:
        self.reset_parameters(std)

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """std: standard deviation of the experts' initial weights; None: `widths.default_std`."""
        for weight in (self.up, self.down):
            weight.normal_(std=default_std(self.up.shape[-1]) if std is None else std)
        if self.choice_bias is not None:
            self.choice_bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        routing, weights = self.route(x)
        self.routing = routing._replace(graded=torch.is_grad_enabled()) if self.training else None
        y = self._mixed(x if self.inner is None else self.inner(x), routing.chosen, weights)
        y = y if self.outer is None else self.outer(y)
        if self.shared is None:
            return y
        common = self.shared(x)
        return y + (common if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * common)

    def take_routing(self) -> Routing | None:
        """Returns the routing of the last forward in training, and forgets it."""
        routing, self.routing = self.routing, None
        return routing

    def route(self, x: Tensor) -> tuple[Routing, Tensor]:
        """x [B, T, D] -> (routing, the weights of the chosen experts [B, T, c])."""
        spec, logits = self.spec, self.router(x)
        scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
        merits = scores if self.choice_bias is None else scores + self.choice_bias
        if spec.groups > 1:
            merits = within_groups(merits, spec.groups, spec.chosen_groups, spec.best)
        chosen = merits.topk(spec.chosen, -1).indices
        weights = scores.gather(-1, chosen)
        if spec.normalized:
            weights = shares_of(weights, spec.eps)
        return Routing(scores if spec.scores == "softmax" else shares_of(scores), chosen), weights * spec.scale

    def _mixed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts of x [B, T, size]."""
        # The (token, expert) pairs are sorted by expert, so that the tokens of an expert are contiguous.
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        tokens = order // self.spec.chosen
        # Not bincount, whose output size is unknown to torch.compile.
        counts = flat.new_zeros(self.spec.count).index_add(0, flat, torch.ones_like(flat))
        # The meta device only counts operations, whose number does not depend on the distribution over experts.
        sizes = [len(flat), *[0] * (self.spec.count - 1)] if x.is_meta else counts.tolist()
        each = [x.flatten(0, 1)[tokens].split(sizes), *(getattr(self, name).unbind() for name in self.PARTS)]
        out = torch.cat([self._expert(*one) for one in zip(*each, strict=True)])
        out = out * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).flatten(0, 1).index_add(0, tokens, out).view_as(x)

    def _expert(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, *values = F.linear(x, up).chunk(1 + self.gated, -1)
        hidden = self.activation(gate)
        return F.linear(hidden * values[0] if self.gated else hidden, down)


def within_groups(merits: Tensor, groups: int, chosen: int, best: int) -> Tensor:
    """Returns merits [..., E] with −∞ for all experts but those of the `chosen` groups whose `best` largest merits have
    the largest sums."""
    grouped = merits.unflatten(-1, (groups, -1))
    first = grouped.topk(best, -1).values.sum(-1).topk(chosen, -1).indices
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, first, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def shares_of(scores: Tensor, eps: float = 0.0) -> Tensor:
    """Returns scores [..., E] ≥ 0 divided by their sum plus eps; zeros stay zeros."""
    return scores / (scores.sum(-1, keepdim=True) + eps).clamp(min=torch.finfo(scores.dtype).tiny)


MLPS["experts"] = f"{__name__}.MixtureOfExperts"
