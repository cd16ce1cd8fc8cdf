"""Loss of polarity and context collapse: two weaknesses of linear attention from arXiv 2602.01744, section 2.2.

The third, magnitude neglect, is in `head_competition`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from headrace.layers.linear.features import FEATURE_MAPS

from .base import (
    BLUE,
    RED,
    TOLERANCE,
    Check,
    attention_weights,
    check_equal,
    format_values,
    head_gates,
    normal,
    normalized,
    softmax_weights,
    subplots,
    unit_vectors,
)

H, K, T = 4, 16, 400
RINGS = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594")  # colours, from short queries to long ones
SOFTMAX, IDENTITY, RELU = "softmax attention", "φ = identity", "φ = ReLU"
COMPETING = f"{RELU}, {H} heads compete"
relu = FEATURE_MAPS["relu"]


@dataclass
class PolarityLoss:
    """Loss of polarity: a non-negative feature map gives the weight 0 both to opposite and to many unrelated keys, and
    non-negative gates do not restore the sign."""

    cosine: Tensor  # of query and key, from −1 to 1 [T]
    weight: dict[str, Tensor]  # attention -> weights of the keys [T]
    parts: Check

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        cosine, q = torch.linspace(-1, 1, T).double(), unit_vectors(generator, 1, 1, H, K)
        side = normal(generator, 1, T, H, K)
        side = F.normalize(side - (side * q).sum(-1, keepdim=True) * q, dim=-1)
        keys = cosine[None, :, None, None] * q + (1 - cosine**2).sqrt()[None, :, None, None] * side
        gates = head_gates(2 * normal(generator, H, K))
        gated = attention_weights(relu(q), relu(keys), write_gate=gates(keys)) * gates(q)[..., None]
        weight = {
            SOFTMAX: softmax_weights(4 * K**0.5 * q, keys)[0, 0, 0],
            IDENTITY: attention_weights(q, keys)[0, 0, 0],
            RELU: attention_weights(relu(q), relu(keys))[0, 0, 0],
            COMPETING: gated[0, 0].sum(0),
        }
        signs = [sa * sb * attention_weights(relu(sa * q), relu(sb * keys)) for sa in (1, -1) for sb in (1, -1)]
        parts = check_equal(
            "q·k = sum of the ReLU kernel over the four pairs of signs",
            torch.stack(signs).sum(0),
            attention_weights(q, keys),
        )
        return cls(cosine, weight, parts)

    @property
    def order(self) -> dict[str, float]:
        """The rank correlation of weight and q·k over the keys with q·k < 0."""
        below = self.cosine < 0
        return {name: rank_correlation(w[below], self.cosine[below]) for name, w in self.weight.items()}

    def checks(self) -> list[Check]:
        opposite = {name: float(w[0]) for name, w in self.weight.items()}
        lowest = {name: float(w.min()) for name, w in self.weight.items()}
        return [
            self.parts,
            *(Check(f"{x}: weight of the opposite key", abs(opposite[x]), "≤", TOLERANCE) for x in (RELU, COMPETING)),
            *(Check(f"{x}: smallest weight", lowest[x], "≥", 0) for x in (RELU, COMPETING)),
            Check("identity: weight of the opposite key", opposite[IDENTITY], "≤", -1 + TOLERANCE),
            Check("softmax: rank correlation with q·k over q·k < 0", self.order[SOFTMAX], "≥", 1 - TOLERANCE),
            Check("ReLU: rank correlation with q·k over q·k < 0", self.order[RELU], "≤", 0.97),
        ]

    def summary(self) -> str:
        values = format_values(self.order)
        return f"Over keys with q·k < 0, the rank correlation of the weight and q·k is {values}."

    def figure(self) -> Figure:
        figure, axes = subplots(4, 2.9, 3.0)
        for ax, (name, w) in zip(axes, self.weight.items(), strict=True):
            ax.plot(self.cosine, w / w.abs().max(), ".", ms=3, color=RED if name == COMPETING else BLUE)
            ax.set(title=name, xlabel="cosine of q and k", ylim=(-1.08, 1.08))
            ax.title.set_fontsize(10)
        axes[0].set_ylabel("weight / largest weight")
        return figure


def rank_correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.argsort().argsort().double() for x in (a, b)]))[0, 1])


class Readout(NamedTuple):
    """The outputs of two heads, of one value channel each, for queries in a plane."""

    out: Tensor  # [N, 2]
    jacobian: Tensor  # derivative of the outputs with respect to the two coordinates [N, 2, 2]

    @property
    def singular_value_ratio(self) -> float:
        """Median of the smaller over the larger singular value; 0 where the plane is mapped to a curve."""
        singular = torch.linalg.svdvals(self.jacobian)
        return float((singular[:, 1] / singular[:, 0]).median())


@dataclass
class ContextCollapse:
    """Context collapse: linear attention (φ = ReLU) gives the same output for queries that differ only in length.
    Softmax attention and linear attention with head competition distinguish them."""

    radius: Tensor  # lengths of the queries
    points: Tensor  # the queries, circle by circle [N, 2]
    readouts: dict[str, Readout]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        radius, angle = torch.linspace(0.4, 2, len(RINGS)).double(), torch.linspace(0, 2 * torch.pi, 97)[:-1].double()
        points = (radius[:, None, None] * torch.stack([angle.cos(), angle.sin()], -1)).flatten(0, 1)
        embedding = normal(generator, 2, 2, K)
        reads = readers(normal(generator, 1, 8, 2, K), normal(generator, 1, 8, 2, 1), normal(generator, 2, K) / K**0.5)

        def of_plane(reader: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: reader(torch.einsum("np,phk->nhk", x, embedding)[None])

        return cls(radius, points, {name: differentiated(of_plane(reader), points) for name, reader in reads.items()})

    def checks(self) -> list[Check]:
        softmax, linear, competing = self.readouts.values()
        along = (linear.jacobian @ self.points[..., None]).abs().max()
        return [
            Check("linear: derivative along the query", float(along), "≤", TOLERANCE),
            Check("linear: ratio of singular values, median", linear.singular_value_ratio, "≤", TOLERANCE),
            Check("softmax: ratio of singular values, median", softmax.singular_value_ratio, "≥", 1e-3),
            Check("with competition: ratio of singular values, median", competing.singular_value_ratio, "≥", 1e-3),
        ]

    def summary(self) -> str:
        values = format_values({name: readout.singular_value_ratio for name, readout in self.readouts.items()}, ".2g")
        return f"The median ratio of the smaller to the larger singular value of the Jacobian is {values}."

    def figure(self) -> Figure:
        figure, axes = subplots(3, 3.6, 3.7)
        for ax, (name, readout) in zip(axes, self.readouts.items(), strict=True):
            for circle, r, colour in zip(readout.out.chunk(len(RINGS)), self.radius, RINGS, strict=True):
                ax.plot(*torch.cat([circle, circle[:1]]).T, color=colour, lw=1.6, label=f"|x| = {r:.1f}")
            ax.set(title=name, xlabel="output of head 1")
            ax.title.set_fontsize(10)
        axes[0].set_ylabel("output of head 2")
        axes[0].legend(fontsize=7)
        return figure


def readers(keys: Tensor, values: Tensor, weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Attention functions from queries [1, N, heads, K] to outputs [N, heads], with fixed keys and values
    [1, tokens, heads, ·]."""
    gates = head_gates(weight)

    def average(weights: Tensor) -> Tensor:
        return torch.einsum("bnht,bthv->nh", weights, values)

    def linear(q: Tensor) -> Tensor:
        return average(normalized(attention_weights(relu(q), relu(keys))))

    return {
        SOFTMAX: lambda q: average(softmax_weights(q, keys)),
        "linear attention, φ = ReLU": linear,
        "the same, with head competition": lambda q: 2 * gates(q)[0] * linear(q),
    }


def differentiated(function: Callable[[Tensor], Tensor], x: Tensor) -> Readout:
    """function(x) [N, 2] for x [N, 2], and its Jacobian row by row."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        out = function(x)
        rows = [torch.autograd.grad(out[:, i].sum(), x, retain_graph=True)[0] for i in (0, 1)]
    return Readout(out.detach(), torch.stack(rows, 1))
