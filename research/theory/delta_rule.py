"""The delta rule (arXiv 2102.11174, 2406.06484), and with decay (arXiv 2412.06464)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor

from headrace.ops.attention import linear_attention, step

from .base import BLUE, GREEN, RED, Check, check_equal, full, normal, plot_prediction, subplots, unit_vectors

K, V = 16, 16
delta_step = partial(step, rule="delta", scale=1.0)


def read_at(key: Tensor, state: Tensor) -> Tensor:
    return (key[:, :, None] @ state).squeeze(2)


def project(x: Tensor, onto: Tensor, other: Tensor) -> Tensor:
    """The coefficient a in x = a · onto + b · other."""
    orthogonal = onto - (onto * other).sum() / other.square().sum() * other
    return (x * orthogonal).sum(-1).flatten() / (onto * orthogonal).sum()


TIMES = torch.arange(1, 7)
STRENGTHS, REPORTED = torch.linspace(0, 1, 21).double(), 14  # write strengths β; index of the one in the summary


@dataclass
class Overwriting:
    """Overwriting: a pair written twice is read as 2v by linear attention. After a write of strength β, the delta rule
    reads (1−β) old + β new, does not change the output of orthogonal keys, and equals one step of gradient descent."""

    repeated: dict[str, tuple[Tensor, Tensor]]  # rule -> (predicted, measured) output / v, after each of TIMES
    fractions: dict[str, tuple[Tensor, Tensor]]  # old and new value -> (predicted, measured), at each of STRENGTHS
    equalities: list[Check]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        k, v, state = unit_vectors(generator, 1, 1, K), unit_vectors(generator, 1, 1, V), normal(generator, 1, 1, K, V)
        repeated = {
            "linear attention": (TIMES.double(), again(k, v)),
            "delta, β = 1": (torch.ones(len(TIMES)), again(k, v, 1.0, rule="delta")),
            "delta, β = 0.5": (1 - 0.5 ** TIMES.double(), again(k, v, 0.5, rule="delta")),
        }
        old, beta = read_at(k, state), STRENGTHS[:, None, None, None]
        blends = torch.stack([delta_step(k, k, v, state, beta=b.view(1, 1))[0] for b in STRENGTHS])
        fractions = {
            "old value": (1 - STRENGTHS, project(blends, old, v)),
            "new value": (STRENGTHS, project(blends, v, old)),
        }
        blend = check_equal("delta: output = (1−β) old + β new", blends, (1 - beta) * old + beta * v)
        return cls(
            repeated, fractions, [twice(k, v, state), blend, *one_write(k, v, state, unit_vectors(generator, 1, 1, K))]
        )

    def checks(self) -> list[Check]:
        reads = self.repeated["linear attention"][1]
        doubled = check_equal("linear attention: output after two writes = 2v", reads[1:2], torch.tensor([2.0]))
        return [doubled, *self.equalities]

    def summary(self) -> str:
        linear, delta, _ = (float(measured[-1]) for _, measured in self.repeated.values())
        *_, orthogonal, descent = self.equalities
        return (
            f"After {len(TIMES)} writes of the same pair, linear attention reads {linear:.3f} v and the delta rule "
            f"with β = 1 reads {delta:.3f} v. A delta write of strength {STRENGTHS[REPORTED]:g} leaves a fraction of "
            f"{float(self.fractions['old value'][1][REPORTED]):.2f} of the old value, changes the output of an "
            f"orthogonal key by {orthogonal.measured:.0e}, and differs from a step of gradient descent by "
            f"{descent.measured:.0e}."
        )

    def figure(self) -> Figure:
        figure, (left, right) = subplots(2)
        plot_prediction(
            left, TIMES, self.repeated, (BLUE, RED, GREEN),
            xlabel="number of writes of the same pair", ylabel="output / value",
        )  # fmt: skip
        plot_prediction(
            right, STRENGTHS, self.fractions, (BLUE, RED),
            xlabel="write strength β of the delta rule", ylabel="fraction in the output",
        )  # fmt: skip
        return figure


def again(k: Tensor, v: Tensor, beta: float = 1.0, **rule: Any) -> Tensor:
    """The component of the output along v after each of TIMES writes of one pair."""
    n = len(TIMES)
    q, values, beta_t = k.expand(1, n, 1, K), v.expand(1, n, 1, V), full(beta, 1, n, 1)
    return (linear_attention(q, q, values, beta=beta_t, scale=1.0, **rule)[0] * v).sum(-1)[0, :, 0]


def twice(k: Tensor, v: Tensor, state: Tensor) -> Check:
    once = delta_step(k, k, v, state)[1]
    return check_equal("delta, β = 1: state after two writes = state after one", delta_step(k, k, v, once)[1], once)


def one_write(k: Tensor, v: Tensor, state: Tensor, other: Tensor) -> list[Check]:
    """The effect of one write on the state, and on the output of the part of `other` that is orthogonal to k."""
    other, rate = F.normalize(other - (other * k).sum() * k, dim=-1), STRENGTHS[REPORTED]
    after = delta_step(k, k, v, state, beta=rate.view(1, 1))[1]
    return [
        check_equal("delta: output of an orthogonal key is unchanged", read_at(other, after), read_at(other, state)),
        check_equal("delta: state = state after one SGD step on ½|v − kS|²", after, descended(state, k, v, rate)),
    ]


def descended(state: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Tensor:
    with torch.enable_grad():
        S = state.clone().requires_grad_()
        loss = 0.5 * (v - read_at(k, S)).square().sum()
        return S.detach() - rate * torch.autograd.grad(loss, S)[0]


THETA, BETA, ALPHAS = torch.linspace(0, torch.pi, 33).double(), 0.8, (1.0, 0.6)
DEGREES = THETA.rad2deg()


@dataclass
class KeyAngle:
    """Angle between keys: a delta write to a key at an angle θ from an old key replaces a fraction of the old key's
    value that depends on cos θ, with decay (α < 1) and without."""

    old: dict[float, Tensor]  # α -> fraction of the old value in the output of its key, at each of THETA
    new: dict[float, Tensor]  # α -> fraction of the new value
    any_state: list[Check]  # the equation for a random state

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        directions = torch.linalg.qr(normal(generator, K, 2)).Q.T
        v, state = unit_vectors(generator, 1, 1, V), normal(generator, 1, 1, K, V)
        old_value = unit_vectors(generator, 1, 1, V)
        alone = directions[0][:, None] * old_value[..., None, :]
        reading = {alpha: read_after(alone, directions, v, alpha) for alpha in ALPHAS}
        old = {alpha: project(out, old_value, v) for alpha, out in reading.items()}
        new = {alpha: project(out, v, old_value) for alpha, out in reading.items()}
        return cls(old, new, [cosine_law(state, directions, v, alpha) for alpha in ALPHAS])

    def checks(self) -> list[Check]:
        claim = "remaining fraction of the old value = α (1 − β cos² θ)"
        return [
            *self.any_state,
            *(check_equal(f"α = {alpha:g}: {claim}", old, remaining(alpha)) for alpha, old in self.old.items()),
        ]

    def summary(self) -> str:
        at = {angle: int((DEGREES - angle).abs().argmin()) for angle in (45, 90)}
        plain, decayed = ([float(self.old[alpha][i]) for i in at.values()] for alpha in ALPHAS)
        return (
            f"After a write of strength {BETA:g}, the remaining fraction of an old value is {plain[0]:.2f} if the keys "
            f"are 45° apart and {plain[1]:.2f} if they are 90° apart; with a decay of {ALPHAS[1]:g}, it is "
            f"{decayed[0]:.2f} and {decayed[1]:.2f}."
        )

    def figure(self) -> Figure:
        figure, (ax,) = subplots(1, 6.4, 4.0)
        pairs = {f"old value, α = {alpha:g}": (remaining(alpha), old) for alpha, old in self.old.items()}
        pairs["new value, any α"] = (BETA * THETA.cos(), self.new[ALPHAS[0]])
        plot_prediction(
            ax, DEGREES, pairs, (BLUE, GREEN, RED), xticks=range(0, 181, 30),
            xlabel="angle θ between the old and the new key (degrees)",
            ylabel=f"fraction in the output of the old key (β = {BETA:g})",
        )  # fmt: skip
        return figure


def remaining(alpha: float) -> Tensor:
    return alpha * (1 - BETA * THETA.cos().square())


def new_keys(directions: Tensor) -> Tensor:
    return (THETA.cos()[:, None] * directions[0] + THETA.sin()[:, None] * directions[1])[:, None]


def read_after(state: Tensor, directions: Tensor, v: Tensor, alpha: float) -> Tensor:
    """The output of the old key (the first direction) on a state [1, 1, K, V], after a write at each of THETA to it."""
    n, keys = len(THETA), new_keys(directions)
    beta, log_decay = full(BETA, n, 1), full(alpha, n, 1).log()
    values, states = v.expand(n, 1, V), state.expand(n, 1, K, V)
    after = delta_step(keys, keys, values, states, beta=beta, log_decay=log_decay)[1]
    return read_at(directions[0].expand(n, 1, K), after)


def cosine_law(state: Tensor, directions: Tensor, v: Tensor, alpha: float) -> Check:
    cosine, old = THETA.cos()[:, None, None], read_at(directions[:1, None], state)
    predicted = alpha * old - alpha * BETA * cosine * read_at(new_keys(directions), state) + BETA * cosine * v
    claim = f"α = {alpha:g}: output of k_old = α S k_old − αβ (S k_new) cos θ + β v_new cos θ"
    return check_equal(claim, read_after(state, directions, v, alpha), predicted)
