"""Does a larger query read more sharply? arXiv 2602.01744, section 4: Proposition 4.1, Theorems 4.2 and 4.3."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from ...layers.feature_maps import FEATURE_MAPS
from .base import (
    BLUE,
    EXACT,
    GREEN,
    PURPLE,
    RED,
    YELLOW,
    Row,
    competition,
    curves,
    draw,
    entropy,
    exact,
    panels,
    read,
    shares,
    softmax_weights,
    weights,
    written,
)

H, K, T = 8, 16, 32
HEADS, DRAWS = 4, 200  # of the gates alone
QUARTERS: dict[str, Any] = {"xscale": "log", "yticks": [0, 0.25, 0.5, 0.75, 1], "legend": "upper left"}


@dataclass
class Magnitude:
    """Magnitude neglect (Proposition 4.1): a query λ times as large attends no more sharply, where φ is ReLU."""

    scales: Tensor  # λ
    change: dict[str, Tensor]  # by feature map: largest change of a weight since λ = 1, over the largest weight
    lowest: dict[str, float]  # the smallest weight
    entropies: dict[str, Tensor]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        scales, one = torch.logspace(-1, 2, 49, dtype=torch.float64), 16
        keys, q = draw(generator, 1, T, H, K), draw(generator, 1, 1, H, K)
        queries = scales[None, :, None, None] * q
        maps = {name: FEATURE_MAPS[name] for name in ("relu", "identity", "elu+1", "silu")}
        linear = {name: shares(weights(phi(queries), phi(keys)))[0, :, 0] for name, phi in maps.items()}
        gates = competition(draw(generator, H, K) / K**0.5)(queries)[0]
        entropies = {
            "linear attention, ReLU": entropy(linear["relu"]), "linear attention, elu+1": entropy(linear["elu+1"]),
            "softmax attention": entropy(softmax_weights(queries, keys)[0, :, 0]),
            "head competition: the gates": entropy(gates),
        }  # fmt: skip
        change = {name: (w - w[one]).abs().amax(-1) / w[one].abs().max() for name, w in linear.items()}
        return cls(scales, change, {name: float(w.min()) for name, w in linear.items()}, entropies)

    @property
    def falls(self) -> list[float]:
        return [float((curve[0] - curve[-1]).clamp(min=0)) for curve in self.entropies.values()]

    def laws(self) -> list[Row]:
        change = {name: float(changes.max()) for name, changes in self.change.items()}
        *_, softmax, gates = self.falls
        return [
            Row("ReLU: change of a weight by λ", change["relu"], "≤", EXACT),
            Row("ReLU: smallest weight", self.lowest["relu"], "≥", 0),
            Row("identity: change of a weight by λ", change["identity"], "≤", EXACT),
            Row("identity: smallest weight (negative: no entropy)", self.lowest["identity"], "≤", -1e-3),
            Row("elu+1 is not homogeneous: change by λ", change["elu+1"], "≥", 1e-3),
            Row("SiLU is not homogeneous: change by λ", change["silu"], "≥", 1e-3),
            Row("softmax attention: fall of the entropy", softmax, "≥", 0.5),
            Row("head competition: fall of the gates' entropy", gates, "≥", 0.5),
        ]

    def sentence(self) -> str:
        relu, elu, softmax, gates = self.falls
        signed = {name: low for name, low in self.lowest.items() if low < 0}
        return (
            f"From λ = {self.scales[0]:g} to {self.scales[-1]:g} the entropy falls by {softmax:.2f} in softmax "
            f"attention, by {gates:.2f} between competing heads, by {elu:.2f} under elu+1 and by {relu:.2g} under "
            f"ReLU; {' and '.join(signed)} have weights down to {min(signed.values()):.2g} and so no entropy."
        )

    def figure(self) -> Figure:
        figure, (left, right) = panels(2)
        named = {
            f"φ = {name}" + (" (negative weights: no entropy)" if self.lowest[name] < 0 else ""): x.clamp(min=1e-17)
            for name, x in self.change.items()
        }
        length = "length of the query, times λ"
        curves(
            left, self.scales, self.entropies, (BLUE, YELLOW, "#333", RED),
            xlabel=length, ylabel="entropy / log(choices)", ylim=(-0.03, 1.4), **QUARTERS,
        )  # fmt: skip
        curves(
            right, self.scales, named, (BLUE, PURPLE, YELLOW, GREEN),
            xlabel=length, ylabel="largest change of a weight since λ = 1\n(relative)", ylim=(1e-17, 1e7),
            xscale="log", yscale="log", yticks=[1e-16, 1e-12, 1e-8, 1e-4, 1], legend="upper left",
        )  # fmt: skip
        return figure


def gates_of(scores: Tensor) -> Tensor:
    """[..., H] -> head competition's gates, of the same shape."""
    heads = scores.reshape(1, -1, scores.shape[-1], 1)
    return competition(torch.ones(scores.shape[-1], 1, dtype=scores.dtype))(heads).view_as(scores)


@dataclass
class Winner:
    """Winner takes all (Theorems 4.2, 4.3): as scores grow, heads pass on what was written where it is read, or half of
    it in a tie."""

    scales: Tensor  # λ [n]
    scores: tuple[Tensor, Tensor]  # of reading and writing [draws, heads]
    gates: tuple[Tensor, Tensor]  # [n, draws, heads]
    tied: Tensor  # gates where two heads have the same score, the largest [n, heads]
    level: Tensor  # gates where all have [n, heads]
    through_the_op: Row

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        scales = torch.cat([torch.zeros(1), torch.logspace(-1, 2, 46)]).double()
        reads, writes = scores = draw(generator, DRAWS, HEADS), draw(generator, DRAWS, HEADS)
        gates = gates_of(scales[:, None, None] * reads), gates_of(scales[:, None, None] * writes)
        tie = torch.tensor([1.0, 1.0, -0.5, -1.0]).double()
        tied, level = (gates_of(scales[:, None] * row) for row in (tie, 0 * tie))
        return cls(scales, scores, gates, tied, level, flows_through_the_op(generator, *gates))

    @property
    def flow(self) -> Tensor:
        return (self.gates[0] * self.gates[1]).sum(-1)

    @property
    def agree(self) -> Tensor:
        return self.scores[0].argmax(-1) == self.scores[1].argmax(-1)

    def beyond(self, distance: Tensor, times: int, gap: Tensor) -> float:
        """The largest distance from a limit, [n, draws], over so many times (H − 1) e^(−λ gap)."""
        return float((distance - times * (HEADS - 1) * (-self.scales[:, None] * gap).exp()).max())

    def laws(self) -> list[Row]:
        gaps = [scores.topk(2).values.diff().abs()[:, 0] for scores in self.scores]
        rises = entropy(self.gates[0]).diff(dim=0).max()
        gap = torch.minimum(*gaps)
        alone, apart = 1 - self.gates[0].amax(-1), (self.flow - self.agree.double()).abs()
        tied, level = self.tied[-1], (entropy(self.level) - 1).abs().max()
        return [
            Row("4.2: largest rise of an entropy as λ grows", float(rises), "≤", EXACT),
            Row("4.2: winner's distance from 1, beyond 3 e^(−λ gap)", self.beyond(alone, 1, gaps[0]), "≤", EXACT),
            Row("4.3: flow's distance from 1 or 0, beyond 6 e^(−λ gap)", self.beyond(apart, 2, gap), "≤", EXACT),
            Row("4.3 fails in a tie: flow's distance from 1/2", abs(float(tied.square().sum()) - 0.5), "≤", EXACT),
            Row("4.2 fails in a tie: entropy's distance from 1/2", abs(float(entropy(tied)) - 0.5), "≤", EXACT),
            Row("4.2 fails for equal scores: change of the entropy", float(level), "≤", EXACT),
            self.through_the_op,
        ]

    def sentence(self) -> str:
        flow, agree = self.flow[-1], self.agree
        return (
            f"At λ = {self.scales[-1]:g} a mean of {float(flow[agree].mean()):.3f} passes where the same head wins "
            f"reading and writing, {float(flow[~agree].mean()):.3f} where different heads do, "
            f"{float(self.tied[-1].square().sum()):.3f} where two tie; the entropy falls to "
            f"{float(entropy(self.gates[0][-1]).mean()):.3f}, with a tie to {float(entropy(self.tied[-1])):.3f}, and "
            f"of equal scores is {float(entropy(self.level[-1])):.3f}."
        )

    def figure(self) -> Figure:
        figure, (left, right) = panels(2)
        entropies = {
            f"one head is first (mean of {DRAWS})": entropy(self.gates[0]).mean(1),
            "two heads tie for it": entropy(self.tied), "all scores equal": entropy(self.level),
        }  # fmt: skip
        flows = {
            "the same head wins": self.flow[:, self.agree].mean(1),
            "two heads tie, in both": self.tied.square().sum(-1),
            "different heads win": self.flow[:, ~self.agree].mean(1),
        }
        for ax, ys, colours, label in (
            (left, entropies, (BLUE, RED, YELLOW), "entropy of the gates / log(heads)"),
            (right, flows, (BLUE, RED, GREEN), "information flow Σ gate of q × gate of k"),
        ):
            seen = {name: y[1:] for name, y in ys.items()}
            curves(
                ax,
                self.scales[1:],
                seen,
                colours,
                xlabel="scores, times λ",
                ylabel=label,
                ylim=(-0.03, 1.35),
                **QUARTERS,
            )
        return figure


def flows_through_the_op(generator: Generator, reads: Tensor, writes: Tensor) -> Row:
    """One pair in heads that are all alike: what they give together is C(λ) times what one would."""
    k, v = F.normalize(draw(generator, 1, 1, 1, K), dim=-1), draw(generator, 1, 1, 1, K)
    k, v = k.expand(1, 1, HEADS, K), v.expand(1, 1, HEADS, K)
    reads, writes = reads[10, :1][None], writes[10, :1][None]
    out = read(written(k, v, write_gate=writes), k, read_gate=reads)
    return exact("the op with both gates passes C(λ) v", out.sum(2), (reads * writes).sum() * v[:, :, 0])
