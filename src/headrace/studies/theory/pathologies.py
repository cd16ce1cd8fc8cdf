"""Two more of what arXiv 2602.01744 (section 2.2) names as lost without softmax: polarity and distinct queries. The
third, magnitude, is Proposition 4.1."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from ...layers.feature_maps import FEATURE_MAPS
from .base import (
    BLUE,
    EXACT,
    RED,
    Row,
    competition,
    draw,
    exact,
    listed,
    panels,
    shares,
    softmax_weights,
    unit,
    weights,
)

H, K, T = 4, 16, 400
RINGS = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594")  # from short queries to long ones
SOFTMAX, IDENTITY, RELU = "softmax attention", "φ = identity", "φ = ReLU"
COMPETING = f"{RELU}, {H} heads compete"
relu = FEATURE_MAPS["relu"]


@dataclass
class Polarity:
    """Loss of polarity: a kernel that is never negative cannot tell an opposite key from one unrelated, and gates
    that are never negative do not bring the sign back."""

    cosine: Tensor  # of query and key, from −1 to 1
    weight: dict[str, Tensor]  # of those keys
    parts: Row

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        cosine, q = torch.linspace(-1, 1, T).double(), unit(generator, 1, 1, H, K)
        side = draw(generator, 1, T, H, K)
        side = F.normalize(side - (side * q).sum(-1, keepdim=True) * q, dim=-1)
        keys = cosine[None, :, None, None] * q + (1 - cosine**2).sqrt()[None, :, None, None] * side
        gates = competition(2 * draw(generator, H, K))
        gated = weights(relu(q), relu(keys), write_gate=gates(keys)) * gates(q)[..., None]
        weight = {
            SOFTMAX: softmax_weights(4 * K**0.5 * q, keys)[0, 0, 0],
            IDENTITY: weights(q, keys)[0, 0, 0],
            RELU: weights(relu(q), relu(keys))[0, 0, 0],
            COMPETING: gated[0, 0].sum(0),
        }
        signs = [sa * sb * weights(relu(sa * q), relu(sb * keys)) for sa in (1, -1) for sb in (1, -1)]
        parts = exact("q·k is ReLU's part and the three of other signs", torch.stack(signs).sum(0), weights(q, keys))
        return cls(cosine, weight, parts)

    @property
    def order(self) -> dict[str, float]:
        """The rank correlation of weight and q·k where that is negative."""
        below = self.cosine < 0
        return {name: rank_correlation(w[below], self.cosine[below]) for name, w in self.weight.items()}

    def laws(self) -> list[Row]:
        opposite = {name: float(w[0]) for name, w in self.weight.items()}
        lowest = {name: float(w.min()) for name, w in self.weight.items()}
        return [
            self.parts,
            *(Row(f"{x}: weight of the opposite key", abs(opposite[x]), "≤", EXACT) for x in (RELU, COMPETING)),
            *(Row(f"{x}: smallest weight", lowest[x], "≥", 0) for x in (RELU, COMPETING)),
            Row("identity: weight of the opposite key", opposite[IDENTITY], "≤", -1 + EXACT),
            Row("softmax: rank correlation with q·k, where it is negative", self.order[SOFTMAX], "≥", 1 - EXACT),
            Row("ReLU: rank correlation with q·k, where it is negative", self.order[RELU], "≤", 0.97),
        ]

    def sentence(self) -> str:
        said = listed(self.order)
        return f"Among keys on the far side of the query, weights follow q·k with a rank correlation of {said}."

    def figure(self) -> Figure:
        figure, axes = panels(4, 2.9, 3.0)
        for ax, (name, w) in zip(axes, self.weight.items(), strict=True):
            ax.plot(self.cosine, w / w.abs().max(), ".", ms=3, color=RED if name == COMPETING else BLUE)
            ax.set(title=name, xlabel="cosine of q and k", ylim=(-1.08, 1.08))
            ax.title.set_fontsize(10)
        axes[0].set_ylabel("weight, over the largest")
        return figure


def rank_correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.argsort().argsort().double() for x in (a, b)]))[0, 1])


class Plane(NamedTuple):
    """What two heads read of queries in a plane."""

    out: Tensor  # [N, 2]
    slopes: Tensor  # its derivative by the plane's two coordinates [N, 2, 2]

    @property
    def kept(self) -> float:
        """The median of the smaller slope over the larger: 0 where a plane is read as a curve."""
        singular = torch.linalg.svdvals(self.slopes)
        return float((singular[:, 1] / singular[:, 0]).median())


@dataclass
class Collapse:
    """Context collapse: queries that differ in length alone read the same of linear attention (φ = ReLU); softmax
    attention and competing heads tell them apart."""

    radius: Tensor  # lengths of the queries
    points: Tensor  # the queries, circle by circle [N, 2]
    seen: dict[str, Plane]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        radius, turn = torch.linspace(0.4, 2, len(RINGS)).double(), torch.linspace(0, 2 * torch.pi, 97)[:-1].double()
        points = (radius[:, None, None] * torch.stack([turn.cos(), turn.sin()], -1)).flatten(0, 1)
        into = draw(generator, 2, 2, K)
        reads = readers(draw(generator, 1, 8, 2, K), draw(generator, 1, 8, 2, 1), draw(generator, 2, K) / K**0.5)

        def of_plane(reader: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: reader(torch.einsum("np,phk->nhk", x, into)[None])

        return cls(radius, points, {name: differentiated(of_plane(reader), points) for name, reader in reads.items()})

    def laws(self) -> list[Row]:
        softmax, linear, competing = self.seen.values()
        along = (linear.slopes @ self.points[..., None]).abs().max()
        return [
            Row("linear: change of what is read along the query", float(along), "≤", EXACT),
            Row("linear: smaller over larger slope, median", linear.kept, "≤", EXACT),
            Row("softmax: smaller over larger slope, median", softmax.kept, "≥", 1e-3),
            Row("with competition: smaller over larger slope, median", competing.kept, "≥", 1e-3),
        ]

    def sentence(self) -> str:
        said = listed({name: plane.kept for name, plane in self.seen.items()}, ".2g")
        return f"Of two directions in which queries differ, the weaker moves what is read by {said} of the stronger."

    def figure(self) -> Figure:
        figure, axes = panels(3, 3.6, 3.7)
        for ax, (name, plane) in zip(axes, self.seen.items(), strict=True):
            for circle, r, colour in zip(plane.out.chunk(len(RINGS)), self.radius, RINGS, strict=True):
                ax.plot(*torch.cat([circle, circle[:1]]).T, color=colour, lw=1.6, label=f"|x| = {r:.1f}")
            ax.set(title=name, xlabel="read by head 1")
            ax.title.set_fontsize(10)
        axes[0].set_ylabel("read by head 2")
        axes[0].legend(fontsize=7)
        return figure


def readers(keys: Tensor, values: Tensor, weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """What [1, N, heads, K] queries read of keys and values [1, tokens, heads, ·], as [N, heads]."""
    gates = competition(weight)

    def mixed(shares: Tensor) -> Tensor:
        return torch.einsum("bnht,bthv->nh", shares, values)

    def linear(q: Tensor) -> Tensor:
        return mixed(shares(weights(relu(q), relu(keys))))

    return {
        SOFTMAX: lambda q: mixed(softmax_weights(q, keys)),
        "linear attention, φ = ReLU": linear,
        "the same, 2 heads compete": lambda q: 2 * gates(q)[0] * linear(q),
    }


def differentiated(function: Callable[[Tensor], Tensor], x: Tensor) -> Plane:
    """function(x) [N, 2] for x [N, 2], row by row, and its derivative."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        out = function(x)
        slopes = [torch.autograd.grad(out[:, i].sum(), x, retain_graph=True)[0] for i in (0, 1)]
    return Plane(out.detach(), torch.stack(slopes, 1))
