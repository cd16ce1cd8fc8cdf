"""How many pairs a memory holds: n ≲ d_k, d_k being its rows (arXiv 2102.11174, section 4.1)."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from .base import BLUE, RED, YELLOW, Row, competition, draw, full, panels, read, unit, written

BATCH, HEADS = 8, 4
WIDTHS = (32, 64)  # d_k
SHARES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # pairs per row of memory
FULL = SHARES.index(1.0)
BEST = torch.tensor([math.sqrt(max(0, 1 - 1 / share)) for share in SHARES])  # error of the best matrix of this size


class Kind(NamedTuple):
    colour: str
    rule: str = "add"
    decay: float = 1.0
    compete: bool = False


KINDS = {
    "additive": Kind(BLUE),
    "additive, heads compete": Kind(BLUE, compete=True),
    "decay 0.98": Kind(YELLOW, decay=0.98),
    "delta": Kind(RED, "delta"),
    "delta, heads compete": Kind(RED, "delta", compete=True),
}


@dataclass
class Capacity:
    """Capacity: sums of d_k random pairs, in a memory of d_k rows, have as much error as signal; other rules and
    competition have no room for more, but which value it was can be told for longer."""

    error: dict[tuple[str, int], Tensor]  # by kind and d_k: of values of length 1, at each of SHARES
    known: dict[tuple[str, int], Tensor]  # the share of the values that are nearest to what is read

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        seen = {(name, d): recalled(kind, d, generator) for name, kind in KINDS.items() for d in WIDTHS}
        return cls({key: wrong for key, (wrong, _) in seen.items()}, {key: known for key, (_, known) in seen.items()})

    def laws(self) -> list[Row]:
        off = {d: abs(float(self.error["additive", d][FULL]) - 1) for d in WIDTHS}
        above = {f"{name}, d_k = {d}": float((e - BEST).min()) for (name, d), e in self.error.items()}
        at = {name: float(self.error[name, WIDTHS[-1]][FULL]) for name in KINDS}
        return [
            *(Row(f"additive, d_k = {d}: error at n = d_k, distance from 1", x, "≤", 0.15) for d, x in off.items()),
            *(Row(f"{key}: least error above that of the best matrix", x, "≥", -0.05) for key, x in above.items()),
            *(Row(f"{name}: error at n = d_k", x, "≥", 0.4) for name, x in at.items()),
        ]

    def sentence(self) -> str:
        d = WIDTHS[-1]
        at = {name: (float(self.error[name, d][FULL]), 100 * float(self.known[name, d][FULL])) for name in KINDS}
        said = ", ".join(f"{error:.2f} and {known:.0f} % ({name})" for name, (error, known) in at.items())
        return f"At n = d_k = {d} the error and the share of values still recognised are {said}."

    def figure(self) -> Figure:
        figure, (left, right) = panels(2)
        for (name, d), error in self.error.items():
            bold, kind = d == WIDTHS[-1], KINDS[name]
            look: Any = {"color": kind.colour, "ls": "--" if kind.compete else "-", "lw": 2 if bold else 1}
            left.plot(SHARES, error, **look, label=name if bold else None)
            right.plot(SHARES, 100 * self.known[name, d], **look)
        left.plot(SHARES, BEST, color="#333", ls=":", lw=2, label="best matrix of this size")
        for ax in (left, right):
            ax.set(xscale="log", xlabel=f"pairs n / rows d_k (thin: {WIDTHS[0]} rows, bold: {WIDTHS[1]})")
            ax.set_xticks(SHARES[::2], [f"{share:g}" for share in SHARES[::2]])
            ax.minorticks_off()
        left.set(ylabel="retrieval error (of values of length 1)")
        right.set(ylabel="nearest value is the right one (%)")
        left.legend(fontsize=8)
        return figure


def recalled(kind: Kind, d: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """(error, share recognised) by SHARES. With competition d rows are those of all heads together."""
    H = HEADS if kind.compete else 1
    gates = competition(20 * draw(generator, H, d // H))
    found: list[list[Tensor]] = []
    for n in (int(share * d) for share in SHARES):
        k, v = unit(generator, BATCH, n, H, d // H), unit(generator, BATCH, n, 1, d)
        gate = gates(k) if kind.compete else None
        strength: dict[str, Any] = {"beta": gate} if kind.rule == "delta" else {"write_gate": gate}
        decay = full(kind.decay, H).log()
        state = written(k, v.expand(-1, -1, H, -1), rule=kind.rule, log_decay=decay, **strength)
        out, v = read(state, k, read_gate=gate).sum(2), v[:, :, 0]
        found.append([(out - v).square().sum(-1).mean().sqrt(), recognised(out, v).mean()])
    return torch.tensor(found, dtype=torch.float64).unbind(1)  # type: ignore[return-value]


def recognised(out: Tensor, v: Tensor) -> Tensor:
    """Whether what is read [B, n, V] is nearest, by its direction, to the value that was stored: [B, n], 0 or 1."""
    return ((F.normalize(out, dim=-1) @ F.normalize(v, dim=-1).mT).argmax(-1) == torch.arange(v.shape[1])).double()
