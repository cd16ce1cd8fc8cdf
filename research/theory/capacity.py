"""Capacity of a memory: about d_k pairs, where d_k is its number of rows (arXiv 2102.11174, section 4.1)."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from .base import BLUE, RED, YELLOW, Check, full, head_gates, normal, read, subplots, unit_vectors, write

BATCH, HEADS = 8, 4
WIDTHS = (32, 64)  # d_k
LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # pairs per row, n / d_k
FULL = LOADS.index(1.0)
BEST = torch.tensor([math.sqrt(max(0, 1 - 1 / load)) for load in LOADS])  # error of the least-squares matrix


class Variant(NamedTuple):
    colour: str
    rule: str = "add"
    decay: float = 1.0
    compete: bool = False


VARIANTS = {
    "additive": Variant(BLUE),
    "additive, heads compete": Variant(BLUE, compete=True),
    "decay 0.98": Variant(YELLOW, decay=0.98),
    "delta": Variant(RED, "delta"),
    "delta, heads compete": Variant(RED, "delta", compete=True),
}


@dataclass
class Capacity:
    """Capacity: after d_k random pairs, the retrieval error of an additive memory with d_k rows equals the length of
    the values. Decay, the delta rule and head competition do not raise this limit. The stored value remains the nearest
    one to the output for more pairs than that."""

    error: dict[tuple[str, int], Tensor]  # (variant, d_k) -> RMS error of values of length 1, at each of LOADS
    accuracy: dict[tuple[str, int], Tensor]  # (variant, d_k) -> fraction of outputs nearest to their stored value

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        found = {
            (name, d): measure_variant(variant, d, generator) for name, variant in VARIANTS.items() for d in WIDTHS
        }
        return cls({key: e for key, (e, _) in found.items()}, {key: a for key, (_, a) in found.items()})

    def checks(self) -> list[Check]:
        off = {d: abs(float(self.error["additive", d][FULL]) - 1) for d in WIDTHS}
        excess = {f"{name}, d_k = {d}": float((e - BEST).min()) for (name, d), e in self.error.items()}
        at = {name: float(self.error[name, WIDTHS[-1]][FULL]) for name in VARIANTS}
        return [
            *(Check(f"additive, d_k = {d}: |error − 1| at n = d_k", x, "≤", 0.15) for d, x in off.items()),
            *(Check(f"{key}: minimum of error − least-squares error", x, "≥", -0.05) for key, x in excess.items()),
            *(Check(f"{name}: error at n = d_k", x, "≥", 0.4) for name, x in at.items()),
        ]

    def summary(self) -> str:
        d = WIDTHS[-1]
        at = {name: (float(self.error[name, d][FULL]), 100 * float(self.accuracy[name, d][FULL])) for name in VARIANTS}
        values = ", ".join(f"{error:.2f} and {accuracy:.0f} % ({name})" for name, (error, accuracy) in at.items())
        return f"At n = d_k = {d} pairs, the retrieval error and the retrieval accuracy are {values}."

    def figure(self) -> Figure:
        figure, (left, right) = subplots(2)
        for (name, d), error in self.error.items():
            bold, variant = d == WIDTHS[-1], VARIANTS[name]
            line: Any = {"color": variant.colour, "ls": "--" if variant.compete else "-", "lw": 2 if bold else 1}
            left.plot(LOADS, error, **line, label=name if bold else None)
            right.plot(LOADS, 100 * self.accuracy[name, d], **line)
        left.plot(LOADS, BEST, color="#333", ls=":", lw=2, label="least-squares matrix")
        for ax in (left, right):
            ax.set(xscale="log", xlabel=f"pairs n / rows d_k (thin: d_k = {WIDTHS[0]}, bold: d_k = {WIDTHS[1]})")
            ax.set_xticks(LOADS[::2], [f"{load:g}" for load in LOADS[::2]])
            ax.minorticks_off()
        left.set(ylabel="retrieval error (values have length 1)")
        right.set(ylabel="retrieval accuracy: nearest value is correct (%)")
        left.legend(fontsize=8)
        return figure


def measure_variant(variant: Variant, d: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """(error, accuracy) at each of LOADS. With head competition, d is the total number of rows over all heads."""
    H = HEADS if variant.compete else 1
    gates = head_gates(20 * normal(generator, H, d // H))
    found: list[list[Tensor]] = []
    for n in (int(load * d) for load in LOADS):
        k, v = unit_vectors(generator, BATCH, n, H, d // H), unit_vectors(generator, BATCH, n, 1, d)
        gate = gates(k) if variant.compete else None
        strength: dict[str, Any] = {"beta": gate} if variant.rule == "delta" else {"write_gate": gate}
        decay = full(variant.decay, H).log()
        state = write(k, v.expand(-1, -1, H, -1), rule=variant.rule, log_decay=decay, **strength)
        out, v = read(state, k, read_gate=gate).sum(2), v[:, :, 0]
        found.append([(out - v).square().sum(-1).mean().sqrt(), is_nearest(out, v).mean()])
    return torch.tensor(found, dtype=torch.float64).unbind(1)  # type: ignore[return-value]


def is_nearest(out: Tensor, v: Tensor) -> Tensor:
    """1 where the stored value v [B, n, V] of largest cosine with the output [B, n, V] is the output's own: [B, n]."""
    return ((F.normalize(out, dim=-1) @ F.normalize(v, dim=-1).mT).argmax(-1) == torch.arange(v.shape[1])).double()
