"""The laws of a memory that corrects itself: the delta rule (arXiv 2406.06484, 2102.11174), with decay (2412.06464)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from ...ops.recurrence import linear_attention, step
from .base import BLUE, GREEN, RED, Row, compared, draw, exact, full, panels, unit

K, V = 16, 16
delta_step = partial(step, rule="delta", scale=1.0)


def read_at(key: Tensor, state: Tensor) -> Tensor:
    return (key[:, :, None] @ state).squeeze(2)


def project(x: Tensor, onto: Tensor, other: Tensor) -> Tensor:
    """The coefficient of `onto` where x is a sum of multiples of `onto` and `other`."""
    own = onto - (onto * other).sum() / other.square().sum() * other
    return (x * own).sum(-1).flatten() / (onto * own).sum()


TIMES = torch.arange(1, 7)
STRENGTHS, ONE = torch.linspace(0, 1, 21).double(), 14  # and the one that the sentence is about


@dataclass
class Overwriting:
    """Written twice: linear attention reads 2v; a delta rule of strength β reads (1−β) old + β new, leaves orthogonal
    keys alone, and is one step of gradient descent."""

    repeated: dict[str, tuple[Tensor, Tensor]]  # after each of TIMES, in lengths of v: (the law, what is seen)
    shares: dict[str, tuple[Tensor, Tensor]]  # of the old and the new value, at each of STRENGTHS
    exactly: list[Row]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        k, v, state = unit(generator, 1, 1, K), unit(generator, 1, 1, V), draw(generator, 1, 1, K, V)
        repeated = {
            "linear attention": (TIMES.double(), again(k, v)),
            "delta, β = 1": (torch.ones(len(TIMES)), again(k, v, 1.0, rule="delta")),
            "delta, β = 0.5": (1 - 0.5 ** TIMES.double(), again(k, v, 0.5, rule="delta")),
        }
        old, beta = read_at(k, state), STRENGTHS[:, None, None, None]
        blends = torch.stack([delta_step(k, k, v, state, beta=b.view(1, 1))[0] for b in STRENGTHS])
        shares = {
            "of the old value": (1 - STRENGTHS, project(blends, old, v)),
            "of the new value": (STRENGTHS, project(blends, v, old)),
        }
        blend = exact("delta: read = (1−β) old + β new", blends, (1 - beta) * old + beta * v)
        return cls(repeated, shares, [twice(k, v, state), blend, *one_write(k, v, state, unit(generator, 1, 1, K))])

    def laws(self) -> list[Row]:
        reads = self.repeated["linear attention"][1]
        doubled = exact("linear attention: read after two writes = 2v", reads[1:2], torch.tensor([2.0]))
        return [doubled, *self.exactly]

    def sentence(self) -> str:
        linear, delta, _ = (float(seen[-1]) for _, seen in self.repeated.values())
        *_, orthogonal, descent = self.exactly
        return (
            f"The same pair written {len(TIMES)} times reads as {linear:.3f} v in linear attention and as {delta:.3f} "
            f"v under the delta rule with β = 1; a write of strength {STRENGTHS[ONE]:g} leaves "
            f"{float(self.shares['of the old value'][1][ONE]):.2f} of the old value, moves what an orthogonal key "
            f"reads by {orthogonal.seen:.0e}, and differs from a step of gradient descent by {descent.seen:.0e}."
        )

    def figure(self) -> Figure:
        figure, (left, right) = panels(2)
        compared(
            left, TIMES, self.repeated, (BLUE, RED, GREEN),
            xlabel="times the same pair was written", ylabel="read, in lengths of the value",
        )  # fmt: skip
        compared(
            right, STRENGTHS, self.shares, (BLUE, RED),
            xlabel="write strength β of the delta rule", ylabel="share in what is read",
        )  # fmt: skip
        return figure


def again(k: Tensor, v: Tensor, beta: float = 1.0, **rule: Any) -> Tensor:
    """The length read along v after each of TIMES writes of one pair."""
    n = len(TIMES)
    q, values, beta_t = k.expand(1, n, 1, K), v.expand(1, n, 1, V), full(beta, 1, n, 1)
    return (linear_attention(q, q, values, beta=beta_t, scale=1.0, **rule)[0] * v).sum(-1)[0, :, 0]


def twice(k: Tensor, v: Tensor, state: Tensor) -> Row:
    once = delta_step(k, k, v, state)[1]
    return exact("delta, β = 1: memory after two writes = after one", delta_step(k, k, v, once)[1], once)


def one_write(k: Tensor, v: Tensor, state: Tensor, other: Tensor) -> list[Row]:
    """What a write of one strength does to a key orthogonal to k, made from `other`, and to the memory."""
    other, rate = F.normalize(other - (other * k).sum() * k, dim=-1), STRENGTHS[ONE]
    after = delta_step(k, k, v, state, beta=rate.view(1, 1))[1]
    return [
        exact("delta: an orthogonal key reads what it did", read_at(other, after), read_at(other, state)),
        exact("delta: memory = after one SGD step on ½|v − kS|²", after, descended(state, k, v, rate)),
    ]


def descended(state: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Tensor:
    with torch.enable_grad():
        S = state.clone().requires_grad_()
        loss = 0.5 * (v - read_at(k, S)).square().sum()
        return S.detach() - rate * torch.autograd.grad(loss, S)[0]


THETA, BETA, ALPHAS = torch.linspace(0, torch.pi, 33).double(), 0.8, (1.0, 0.6)
DEGREES = THETA.rad2deg()


@dataclass
class Angle:
    """The cos θ law: a delta rule's write at an angle θ to an old key replaces a part of what that key reads, whether
    memory decays (α) or not."""

    old: dict[float, Tensor]  # by α: the share of the old value in what its key reads, at each of THETA
    new: dict[float, Tensor]  # of the new value
    crowded: list[Row]  # the law in a memory that holds anything

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        directions = torch.linalg.qr(draw(generator, K, 2)).Q.T
        v, crowd = unit(generator, 1, 1, V), draw(generator, 1, 1, K, V)
        old_value = unit(generator, 1, 1, V)
        alone = directions[0][:, None] * old_value[..., None, :]
        reading = {alpha: read_after(alone, directions, v, alpha) for alpha in ALPHAS}
        old = {alpha: project(seen, old_value, v) for alpha, seen in reading.items()}
        new = {alpha: project(seen, v, old_value) for alpha, seen in reading.items()}
        return cls(old, new, [cosine_law(crowd, directions, v, alpha) for alpha in ALPHAS])

    def laws(self) -> list[Row]:
        left = "of the old value α (1 − β cos² θ) is left"
        return [
            *self.crowded,
            *(exact(f"α = {alpha:g}: {left}", old, left_over(alpha)) for alpha, old in self.old.items()),
        ]

    def sentence(self) -> str:
        at = {angle: int((DEGREES - angle).abs().argmin()) for angle in (45, 90)}
        plain, decayed = ([float(self.old[alpha][i]) for i in at.values()] for alpha in ALPHAS)
        return (
            f"A write of strength {BETA:g} leaves {plain[0]:.2f} of a value whose key is 45° away and {plain[1]:.2f} "
            f"at 90°; with a decay of {ALPHAS[1]:g} {decayed[0]:.2f} and {decayed[1]:.2f}."
        )

    def figure(self) -> Figure:
        figure, (ax,) = panels(1, 6.4, 4.0)
        pairs = {f"old value, α = {alpha:g}": (left_over(alpha), old) for alpha, old in self.old.items()}
        pairs["new value, any α"] = (BETA * THETA.cos(), self.new[ALPHAS[0]])
        compared(
            ax, DEGREES, pairs, (BLUE, GREEN, RED), xticks=range(0, 181, 30),
            xlabel="angle θ between the old and the new key (degrees)",
            ylabel=f"share in what the old key reads (β = {BETA:g})",
        )  # fmt: skip
        return figure


def left_over(alpha: float) -> Tensor:
    return alpha * (1 - BETA * THETA.cos().square())


def new_keys(directions: Tensor) -> Tensor:
    return (THETA.cos()[:, None] * directions[0] + THETA.sin()[:, None] * directions[1])[:, None]


def read_after(state: Tensor, directions: Tensor, v: Tensor, alpha: float) -> Tensor:
    """What the old key, the first direction, reads of a memory [1, 1, K, V] after a write at each of THETA to it."""
    n, keys = len(THETA), new_keys(directions)
    beta, log_decay = full(BETA, n, 1), full(alpha, n, 1).log()
    values, states = v.expand(n, 1, V), state.expand(n, 1, K, V)
    after = delta_step(keys, keys, values, states, beta=beta, log_decay=log_decay)[1]
    return read_at(directions[0].expand(n, 1, K), after)


def cosine_law(state: Tensor, directions: Tensor, v: Tensor, alpha: float) -> Row:
    cosine, old = THETA.cos()[:, None, None], read_at(directions[:1, None], state)
    said = alpha * old - alpha * BETA * cosine * read_at(new_keys(directions), state) + BETA * cosine * v
    law = f"α = {alpha:g}: α S k_old − αβ (S k_new) cos θ + β v_new cos θ"
    return exact(law, read_after(state, directions, v, alpha), said)
