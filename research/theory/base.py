"""Building blocks of the experiments: memories, checks and plots.

An experiment is a dataclass of measured values. Its checks, summary and figure are computed from these values alone.
All tensors are float64, with the shapes of `headrace.linear_attention`: [1, T, H, ·] for T tokens and H heads.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from headrace.layers.linear.competition import HeadCompetition
from headrace.ops.attention import linear_attention
from headrace.report.page import PALETTE
from headrace.spec.linear import Competition

BLUE, RED, YELLOW, GREEN, PURPLE = PALETTE[:5]
# The linear mixers of the studies: each token has one key and one value, and one call of the op computes all.
MIXERS = (
    "linear-attention", "taylor-softmax", "retnet", "xpos-retnet", "mamba2", "gla", "rwkv6", "delta-fast-weights",
    "deltanet", "gated-deltanet", "residual-delta", "kda",
)  # fmt: skip
TOLERANCE = 1e-10  # relative error of an equation that holds exactly; float64 gives about 1e-15


class Check(NamedTuple):
    """A measured value and its predicted bound."""

    claim: str
    measured: float
    relation: str  # ≤ or ≥
    bound: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.bound if self.relation == "≤" else self.measured >= self.bound


class Experiment(Protocol):
    """The docstring of an experiment describes it; the command lists it."""

    @classmethod
    def measure(cls, generator: torch.Generator) -> Self: ...

    def checks(self) -> list[Check]: ...

    def summary(self) -> str:
        """One sentence with the main numbers."""

    def figure(self) -> Figure: ...


class Result(NamedTuple):
    checks: list[Check]
    summary: str
    figure: Figure


def format_values(values: Mapping[str, float], form: str = ".2f", empty: str = "none") -> str:
    """Formats named values: "0.41 (softmax attention), 0.13 (…)"."""
    return ", ".join(f"{value:{form}} ({name})" for name, value in values.items()) or empty


def check_equal(claim: str, measured: Tensor, predicted: Tensor) -> Check:
    """Checks max |measured − predicted| / max |predicted| against TOLERANCE."""
    error = (measured - predicted).abs().max() / predicted.abs().max().clamp(min=1e-300)
    return Check(claim, float(error), "≤", TOLERANCE)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def unit_vectors(generator: torch.Generator, *shape: int) -> Tensor:
    return F.normalize(normal(generator, *shape), dim=-1)


def full(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def write(k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """The state [1, H, K, V] after the pairs of keys k and values v have been written."""
    return linear_attention(k, k, v, scale=1.0, **arguments)[1]


def read(state: Tensor, q: Tensor, **arguments: Any) -> Tensor:
    """The output [1, T, H, V] of each query [1, T, H, K] on a state. The keys are 0, so nothing is written."""
    v = q.new_zeros(*q.shape[:3], state.shape[-1])
    return linear_attention(q, torch.zeros_like(q), v, scale=1.0, initial_state=state, **arguments)[0]


def attention_weights(q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
    """The weight of each of T tokens in the output of each query, [1, queries, H, T], measured by one-hot values."""
    T, H = k.shape[1:3]
    one_hot = torch.eye(T, dtype=k.dtype)[None, :, None].expand(1, T, H, T)
    return read(write(k, one_hot, **arguments), q)


def softmax_weights(q: Tensor, k: Tensor) -> Tensor:
    """The weights of softmax attention, in the shape of `attention_weights`."""
    one_hot = torch.eye(k.shape[1], dtype=k.dtype).expand(1, k.shape[2], -1, -1)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), one_hot).transpose(1, 2)


def normalized(weights: Tensor) -> Tensor:
    """Weights divided by their sum over the last dimension."""
    return weights / weights.sum(-1, keepdim=True)


def entropy(p: Tensor) -> Tensor:
    """Entropy over the last dimension, divided by its maximum: 0 for a one-hot p, 1 for a uniform p."""
    return torch.special.entr(p).sum(-1) / math.log(p.shape[-1])


def head_gates(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The gates of head competition (arXiv 2602.01744, equation 4), as a function of queries or keys [1, T, H, K].

    The gates [1, T, H] are the softmax over heads of the scores ⟨q_h, w_h⟩; weight: w [H, K]."""
    H, K = weight.shape
    gates = HeadCompetition(Competition(scale="one"), H * K, H, H, K).to(weight.dtype)
    with torch.no_grad():
        gates.weight.copy_(weight)
    return lambda heads: gates(heads, heads.flatten(-2)).exp()


def subplots(count: int, width: float = 4.4, height: float = 3.7) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def plot_lines(ax: Axes, x: Tensor, ys: Mapping[str, Tensor], colours: Sequence[str], **settings: Any) -> None:
    """Plots one labelled line per entry."""
    for (label, y), colour in zip(ys.items(), colours, strict=True):
        ax.plot(x, y, label=label, color=colour, lw=2)
    set_axes(ax, **settings)


def plot_prediction(
    ax: Axes, x: Tensor, pairs: Mapping[str, tuple[Tensor, Tensor]], colours: Sequence[str], **settings: Any
) -> None:
    """Plots, for each name, the predicted values as a line and the measured values as dots.

    pairs: name -> (predicted, measured)."""
    every = max(len(x) // 16, 1)
    for (label, (predicted, measured)), colour in zip(pairs.items(), colours, strict=True):
        ax.plot(x, predicted, lw=1.6, label=label, color=colour)
        ax.plot(x[::every], measured[::every], "o", ms=5, color=colour)
    set_axes(ax, **settings)


def set_axes(ax: Axes, **settings: Any) -> None:
    """Applies the settings of `Axes.set`, and draws the legend at the location `legend` (default "best")."""
    location = settings.pop("legend", "best")
    ax.set(**settings)
    ax.legend(fontsize=8, loc=location)
