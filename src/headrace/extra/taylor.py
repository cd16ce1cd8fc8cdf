"""The Taylor polynomial of e^x, as a function of logits and as a feature map of q and k whose products equal it
(arXiv 2507.23632, section 3.1)."""

import math
from itertools import combinations_with_replacement, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.base import SelfInitialized
from ..layers.linear.stage import STAGES, Stage, Tokens
from ..ops.call import accumulator
from ..ops.checks import require
from ..spec.linear import Heads, Inputs, MixerSpec, Read
from .registration import register_mixer


def truncated_exp(x: Tensor, order: int) -> Tensor:
    """Returns 1 + x + … + x^n / n! for order n. Positive for all x if n is even, negative for some x if n is odd."""
    total = torch.ones_like(x)
    for m in range(order, 0, -1):
        total = 1 + x / m * total
    return total


MOST = 20  # order of a series


class TaylorFeatures(SelfInitialized):
    """φ: [..., d] -> [..., C(d + n, n)] with φ(q)·φ(k) = Σ_{m ≤ n} (q·k)^m / m! for order n.

    The features are the monomials of x up to order n, computed as the monomials of order n of (1, x). A monomial with
    exponents a_i of x occurs once, with weight Π (a_i!)^(−1/2): the root of its multiplicity in the tensor power over
    m!."""

    columns: Tensor
    repeats: Tensor

    def __init__(self, dim: int, order: int):
        super().__init__()
        require(order <= MOST, f"order={order} of a series; expected at most {MOST}, whose factorial has 64 bits")
        self.dim, self.order = dim, order
        size = math.comb(dim + order, order)
        self.register_buffer("columns", torch.empty(order, size, dtype=torch.long), persistent=False)
        self.register_buffer("repeats", torch.empty(size, dtype=torch.long), persistent=False)  # Π a_i!
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        monomials = list(combinations_with_replacement(range(self.dim + 1), self.order))
        columns = torch.tensor(monomials, dtype=torch.long).view(-1, self.order).T if self.order else self.columns
        run = repeats = torch.ones(len(monomials), dtype=torch.long)
        for before, now in pairwise(columns):
            run = torch.where(now == before, run + 1, 1)
            repeats = repeats * torch.where(now > 0, run, 1)
        self.columns.copy_(columns)
        self.repeats.copy_(repeats)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.pad(x.to(accumulator(x)), (1, 0), value=1.0)
        features = self.repeats.to(wide.dtype).rsqrt().expand(*x.shape[:-1], -1)
        for column in self.columns:
            features = features * wide.index_select(-1, column)
        return features.to(x.dtype)


def rebuild(mixer: Any, *_: Any) -> None:
    """Makes the tables again, where the weights are: no checkpoint has them, to_empty leaves what was in memory before,
    and `load_state_dict(assign=True)` leaves them on the meta device."""
    mixer.features.to_empty(device=next(iter(mixer.state_dict().values())).device)
    mixer.features.reset_parameters()


class Taylor(Stage):
    """The features of q and k, which have the factor of the logits."""

    def build(self, mixer: Any) -> None:
        mixer.features = TaylorFeatures(mixer.spec.features(mixer.K), mixer.spec.inputs.order)
        mixer.register_load_state_dict_post_hook(rebuild)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        root = mixer.logit_scale**0.5
        t.q, t.k = mixer.features(t.q * root), mixer.features(t.k * root)


STAGES["taylor"] = Taylor
register_mixer(
    "taylor-softmax",
    MixerSpec(Heads(key_dim=16), Inputs(rotary=True, order=2), read=Read("sum")),
    about="Linear attention on features whose product is 1 + q·k + (q·k)²/2, the second-order Taylor polynomial of "
    "softmax attention's e^(q·k).",
    paper="https://arxiv.org/abs/2507.23632",
)
register_mixer(
    "based",
    # HazyResearch/based, based-360m: num_heads 16 at a hidden size of 1024, feature_dim 16
    MixerSpec(Heads(key_dim=16, width=64), Inputs(order=2), read=Read("sum")),
    about="Linear attention on the second-order Taylor features of 16 key channels, without positions.",
    paper="https://arxiv.org/abs/2402.18668",
)
