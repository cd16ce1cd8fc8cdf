"""Effect of the query's magnitude, and limits of head competition (arXiv 2602.01744, Proposition 4.1, Theorems 4.2
and 4.3)."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from headrace.layers.linear.features import FEATURE_MAPS

from .base import (
    BLUE,
    GREEN,
    PURPLE,
    RED,
    TOLERANCE,
    YELLOW,
    Check,
    attention_weights,
    check_equal,
    entropy,
    head_gates,
    normal,
    normalized,
    plot_lines,
    read,
    softmax_weights,
    subplots,
    write,
)

H, K, T = 8, 16, 32
HEADS, SAMPLES = 4, 200  # of the experiment on gates alone
QUARTERS: dict[str, Any] = {"xscale": "log", "yticks": [0, 0.25, 0.5, 0.75, 1], "legend": "upper left"}


@dataclass
class MagnitudeNeglect:
    """Magnitude neglect (Proposition 4.1): with φ = ReLU, multiplying a query by λ does not change its weights."""

    scales: Tensor  # λ [n]
    change: dict[str, Tensor]  # feature map -> largest change of a weight from λ = 1, over the largest weight [n]
    lowest: dict[str, float]  # feature map -> smallest weight
    entropies: dict[str, Tensor]  # attention or gates -> entropy / log(choices) [n]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        scales, one = torch.logspace(-1, 2, 49, dtype=torch.float64), 16
        keys, q = normal(generator, 1, T, H, K), normal(generator, 1, 1, H, K)
        queries = scales[None, :, None, None] * q
        maps = {name: FEATURE_MAPS[name] for name in ("relu", "identity", "elu+1", "silu")}
        linear = {name: normalized(attention_weights(phi(queries), phi(keys)))[0, :, 0] for name, phi in maps.items()}
        gates = head_gates(normal(generator, H, K) / K**0.5)(queries)[0]
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

    def checks(self) -> list[Check]:
        change = {name: float(changes.max()) for name, changes in self.change.items()}
        *_, softmax, gates = self.falls
        return [
            Check("ReLU: change of the weights with λ", change["relu"], "≤", TOLERANCE),
            Check("ReLU: smallest weight", self.lowest["relu"], "≥", 0),
            Check("identity: change of the weights with λ", change["identity"], "≤", TOLERANCE),
            Check("identity: smallest weight (negative: entropy is undefined)", self.lowest["identity"], "≤", -1e-3),
            Check("elu+1 (not homogeneous): change of the weights with λ", change["elu+1"], "≥", 1e-3),
            Check("SiLU (not homogeneous): change of the weights with λ", change["silu"], "≥", 1e-3),
            Check("softmax attention: decrease of the entropy", softmax, "≥", 0.5),
            Check("head competition: decrease of the gates' entropy", gates, "≥", 0.5),
        ]

    def summary(self) -> str:
        relu, elu, softmax, gates = self.falls
        signed = {name: low for name, low in self.lowest.items() if low < 0}
        return (
            f"From λ = {self.scales[0]:g} to {self.scales[-1]:g}, the entropy decreases by {softmax:.2f} (softmax "
            f"attention), {gates:.2f} (gates of head competition), {elu:.2f} (elu+1) and {relu:.2g} (ReLU). The "
            f"smallest weight of {' and '.join(signed)} is {min(signed.values()):.2g}, so their entropy is undefined."
        )

    def figure(self) -> Figure:
        figure, (left, right) = subplots(2)
        named = {
            f"φ = {name}" + (" (has negative weights)" if self.lowest[name] < 0 else ""): x.clamp(min=1e-17)
            for name, x in self.change.items()
        }
        length = "factor λ of the query"
        plot_lines(
            left, self.scales, self.entropies, (BLUE, YELLOW, "#333", RED),
            xlabel=length, ylabel="entropy / log(choices)", ylim=(-0.03, 1.4), **QUARTERS,
        )  # fmt: skip
        plot_lines(
            right, self.scales, named, (BLUE, PURPLE, YELLOW, GREEN),
            xlabel=length, ylabel="largest relative change of a weight from λ = 1", ylim=(1e-17, 1e7),
            xscale="log", yscale="log", yticks=[1e-16, 1e-12, 1e-8, 1e-4, 1], legend="upper left",
        )  # fmt: skip
        return figure


def gates_from_scores(scores: Tensor) -> Tensor:
    """The gates of head competition for scores [..., H], in the same shape."""
    heads = scores.reshape(1, -1, scores.shape[-1], 1)
    return head_gates(torch.ones(scores.shape[-1], 1, dtype=scores.dtype))(heads).view_as(scores)


@dataclass
class WinnerTakeAll:
    """Winner takes all (Theorems 4.2, 4.3): as the scores grow, the gates become one-hot. The information flow tends to
    1 if the same head wins reading and writing, to 0 if different heads win, and to 1/2 if two heads tie."""

    scales: Tensor  # λ [n]
    scores: tuple[Tensor, Tensor]  # of reading and writing [samples, heads]
    gates: tuple[Tensor, Tensor]  # of reading and writing [n, samples, heads]
    tied: Tensor  # gates if two heads share the largest score [n, heads]
    equal: Tensor  # gates if all heads have the same score [n, heads]
    op_flow: Check

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        scales = torch.cat([torch.zeros(1), torch.logspace(-1, 2, 46)]).double()
        reads, writes = scores = normal(generator, SAMPLES, HEADS), normal(generator, SAMPLES, HEADS)
        gates = gates_from_scores(scales[:, None, None] * reads), gates_from_scores(scales[:, None, None] * writes)
        tie = torch.tensor([1.0, 1.0, -0.5, -1.0]).double()
        tied, equal = (gates_from_scores(scales[:, None] * row) for row in (tie, 0 * tie))
        return cls(scales, scores, gates, tied, equal, check_op_flow(generator, *gates))

    @property
    def flow(self) -> Tensor:
        """The information flow Σ_h (read gate)(write gate) [n, samples]."""
        return (self.gates[0] * self.gates[1]).sum(-1)

    @property
    def agree(self) -> Tensor:
        return self.scores[0].argmax(-1) == self.scores[1].argmax(-1)

    def excess(self, distance: Tensor, times: int, gap: Tensor) -> float:
        """The maximum of distance [n, samples] − times · (H − 1) e^(−λ gap)."""
        return float((distance - times * (HEADS - 1) * (-self.scales[:, None] * gap).exp()).max())

    def checks(self) -> list[Check]:
        gaps = [scores.topk(2).values.diff().abs()[:, 0] for scores in self.scores]
        increase = entropy(self.gates[0]).diff(dim=0).max()
        gap = torch.minimum(*gaps)
        alone, apart = 1 - self.gates[0].amax(-1), (self.flow - self.agree.double()).abs()
        tied, equal = self.tied[-1], (entropy(self.equal) - 1).abs().max()
        return [
            Check("4.2: largest increase of the entropy as λ grows", float(increase), "≤", TOLERANCE),
            Check("4.2: |largest gate − 1| − 3 e^(−λ gap)", self.excess(alone, 1, gaps[0]), "≤", TOLERANCE),
            Check("4.3: |flow − limit| − 6 e^(−λ gap)", self.excess(apart, 2, gap), "≤", TOLERANCE),
            Check("tie of two heads: |flow − 1/2|", abs(float(tied.square().sum()) - 0.5), "≤", TOLERANCE),
            Check("tie of two heads: |entropy − 1/2|", abs(float(entropy(tied)) - 0.5), "≤", TOLERANCE),
            Check("equal scores: |entropy − 1|", float(equal), "≤", TOLERANCE),
            self.op_flow,
        ]

    def summary(self) -> str:
        flow, agree = self.flow[-1], self.agree
        return (
            f"At λ = {self.scales[-1]:g}, the mean information flow is {float(flow[agree].mean()):.3f} if the same "
            f"head wins reading and writing, {float(flow[~agree].mean()):.3f} if different heads win, and "
            f"{float(self.tied[-1].square().sum()):.3f} if two heads tie. The entropy of the gates is "
            f"{float(entropy(self.gates[0][-1]).mean()):.3f} with one winner, {float(entropy(self.tied[-1])):.3f} with "
            f"a tie, and {float(entropy(self.equal[-1])):.3f} with equal scores."
        )

    def figure(self) -> Figure:
        figure, (left, right) = subplots(2)
        entropies = {
            f"one winner (mean of {SAMPLES} samples)": entropy(self.gates[0]).mean(1),
            "two heads tie": entropy(self.tied), "all scores equal": entropy(self.equal),
        }  # fmt: skip
        flows = {
            "the same head wins": self.flow[:, self.agree].mean(1),
            "two heads tie": self.tied.square().sum(-1),
            "different heads win": self.flow[:, ~self.agree].mean(1),
        }
        for ax, ys, colours, label in (
            (left, entropies, (BLUE, RED, YELLOW), "entropy of the gates / log(heads)"),
            (right, flows, (BLUE, RED, GREEN), "information flow Σ (read gate)(write gate)"),
        ):
            lines = {name: y[1:] for name, y in ys.items()}
            plot_lines(
                ax,
                self.scales[1:],
                lines,
                colours,
                xlabel="factor λ of the scores",
                ylabel=label,
                ylim=(-0.03, 1.35),
                **QUARTERS,
            )
        return figure


def check_op_flow(generator: Generator, reads: Tensor, writes: Tensor) -> Check:
    """Writes one pair to identical heads: the sum of their outputs is the information flow times one head's output."""
    k, v = F.normalize(normal(generator, 1, 1, 1, K), dim=-1), normal(generator, 1, 1, 1, K)
    k, v = k.expand(1, 1, HEADS, K), v.expand(1, 1, HEADS, K)
    reads, writes = reads[10, :1][None], writes[10, :1][None]
    out = read(write(k, v, write_gate=writes), k, read_gate=reads)
    return check_equal("output with both gates = flow · v", out.sum(2), (reads * writes).sum() * v[:, :, 0])
