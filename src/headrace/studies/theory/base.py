"""What experiments are made of: a memory written and read by the library's own op, laws to check, a picture.

An experiment is a record of what was measured, made from a generator; from it alone come its laws, what it says in a
sentence, and its picture. Everything is float64. Shapes are the op's: [1, T, H, ·].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ...layers.competition import HeadCompetition
from ...ops.recurrence import linear_attention
from ...report.style import PALETTE
from ...spec.linear import Competition

BLUE, RED, YELLOW, GREEN, PURPLE = PALETTE[:5]
EXACT = 1e-10


class Row(NamedTuple):
    """A measured number and the bound of a law on it."""

    law: str
    seen: float
    relation: str  # ≤ or ≥
    bound: float

    @property
    def holds(self) -> bool:
        return self.seen <= self.bound if self.relation == "≤" else self.seen >= self.bound


class Experiment(Protocol):
    """Its docstring says what it is about. `measure` alone computes; the rest is read off what it returns."""

    @classmethod
    def measure(cls, generator: torch.Generator) -> Self: ...

    def laws(self) -> list[Row]: ...

    def sentence(self) -> str:
        """A sentence with the main numbers."""

    def figure(self) -> Figure: ...


class Finding(NamedTuple):
    rows: list[Row]
    sentence: str
    figure: Figure


def listed(values: Mapping[str, float], form: str = ".2f", empty: str = "none") -> str:
    """Formats named values: "0.41 (softmax attention), 0.13 (…)"."""
    return ", ".join(f"{value:{form}} ({name})" for name, value in values.items()) or empty


def exact(law: str, seen: Tensor, said: Tensor) -> Row:
    """The largest absolute difference, divided by the largest absolute entry of the law's prediction."""
    return Row(law, float((seen - said).abs().max() / said.abs().max().clamp(min=1e-300)), "≤", EXACT)


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def unit(generator: torch.Generator, *shape: int) -> Tensor:
    return F.normalize(draw(generator, *shape), dim=-1)


def full(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def written(k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """The state [1, H, K, V] after writing the pairs k, v."""
    return linear_attention(k, k, v, scale=1.0, **arguments)[1]


def read(state: Tensor, q: Tensor, **arguments: Any) -> Tensor:
    """The output of each query [1, T, H, K] on the memory, read with keys of 0, which write nothing."""
    v = q.new_zeros(*q.shape[:3], state.shape[-1])
    return linear_attention(q, torch.zeros_like(q), v, scale=1.0, initial_state=state, **arguments)[0]


def weights(q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
    """The weight of each of T tokens in the output of each query, [1, queries, H, T], by one-hot values."""
    T, H = k.shape[1:3]
    names = torch.eye(T, dtype=k.dtype)[None, :, None].expand(1, T, H, T)
    return read(written(k, names, **arguments), q)


def softmax_weights(q: Tensor, k: Tensor) -> Tensor:
    """The weights of softmax attention, as `weights`."""
    names = torch.eye(k.shape[1], dtype=k.dtype).expand(1, k.shape[2], -1, -1)
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), names).transpose(1, 2)


def shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def entropy(p: Tensor) -> Tensor:
    """Entropy divided by its maximum: 0 if one entry has all the weight, 1 if all are equal."""
    return torch.special.entr(p).sum(-1) / math.log(p.shape[-1])


def competition(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Heads [1, T, H, K] -> their gates [1, T, H], the paper's (equation 4), by scores ⟨q_h, w_h⟩ with w [H, K]."""
    H, K = weight.shape
    gates = HeadCompetition(Competition(scale="one"), H * K, H, H, K).to(weight.dtype)
    with torch.no_grad():
        gates.weight.copy_(weight)
    return lambda heads: gates(heads, heads.flatten(-2)).exp()


def panels(count: int, width: float = 4.4, height: float = 3.7) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def curves(ax: Axes, x: Tensor, ys: Mapping[str, Tensor], colours: Sequence[str], **settings: Any) -> None:
    """Draws a labelled line for each entry."""
    for (label, y), colour in zip(ys.items(), colours, strict=True):
        ax.plot(x, y, label=label, color=colour, lw=2)
    finish(ax, **settings)


def compared(
    ax: Axes, x: Tensor, pairs: Mapping[str, tuple[Tensor, Tensor]], colours: Sequence[str], **settings: Any
) -> None:
    """Name -> (the law, a line; what is seen, dots upon it)."""
    every = max(len(x) // 16, 1)
    for (label, (law, seen)), colour in zip(pairs.items(), colours, strict=True):
        ax.plot(x, law, lw=1.6, label=label, color=colour)
        ax.plot(x[::every], seen[::every], "o", ms=5, color=colour)
    finish(ax, **settings)


def finish(ax: Axes, **settings: Any) -> None:
    """`legend`: where it stands; the rest are the axes' own settings."""
    where = settings.pop("legend", "best")
    ax.set(**settings)
    ax.legend(fontsize=8, loc=where)
