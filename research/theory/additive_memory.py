"""Additive memories, S = Σ kᵀv: the output is known in closed form (with decay: arXiv 2405.21060)."""

from dataclasses import dataclass
from typing import Self

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from .base import (
    BLUE,
    GREEN,
    PURPLE,
    RED,
    YELLOW,
    Check,
    attention_weights,
    check_equal,
    full,
    normal,
    plot_prediction,
    read,
    subplots,
    unit_vectors,
    write,
)

K, V = 16, 16
COUNTS = [2, 4, 8, 16, 32, 64, 128, 256, 512]
MEMORIES = 16  # random memories over which the noise is averaged


@dataclass
class Crosstalk:
    """Signal and cross-talk: the output is v|k|² plus the other values, each multiplied by the inner product of the two
    keys. Both parts have the same length when the number of pairs equals the dimension of the keys."""

    noise: dict[int, Tensor]  # dimension of the keys -> RMS length of the cross-talk at each of COUNTS
    sums: list[Check]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        noise, sums = {}, []
        for d in (16, 64, 256):
            k, v = (
                unit_vectors(generator, MEMORIES, COUNTS[-1], 1, d),
                unit_vectors(generator, MEMORIES, COUNTS[-1], 1, V),
            )
            parts = [signal_and_crosstalk(k[:, :n], v[:, :n]) for n in COUNTS]
            noise[d] = torch.stack([(out - signal).square().sum(-1).mean().sqrt() for out, signal, _ in parts])
            out, signal, cross = parts[-1]
            sums.append(check_equal(f"d_k = {d}: output = signal + cross-talk", out, signal + cross))
        return cls(noise, sums)

    @property
    def predicted(self) -> dict[int, Tensor]:
        return {d: (torch.tensor(COUNTS).double() - 1).div(d).sqrt() for d in self.noise}

    def checks(self) -> list[Check]:
        off = {d: float((noise / self.predicted[d] - 1)[2:].abs().max()) for d, noise in self.noise.items()}
        claim = "relative deviation of the cross-talk from √((n−1)/d_k), n ≥ 8"
        return [*self.sums, *(Check(f"d_k = {d}: {claim}", value, "≤", 0.15) for d, value in off.items())]

    def summary(self) -> str:
        values = ", ".join(f"{pairs_at_unit_noise(noise):.0f} pairs (d_k = {d})" for d, noise in self.noise.items())
        return f"The cross-talk is as large as the signal at {values}."

    def figure(self) -> Figure:
        figure, (ax,) = subplots(1, 6.4, 4.0)
        ax.axhline(1, color="#333", ls="--", lw=1.6, label="signal")
        pairs = {f"cross-talk, d_k = {d}": (self.predicted[d], noise) for d, noise in self.noise.items()}
        plot_prediction(
            ax, torch.tensor(COUNTS), pairs, (BLUE, RED, YELLOW), xscale="log", yscale="log",
            xlabel="pairs n in one memory", ylabel="length of the output (values have length 1)",
        )  # fmt: skip
        ax.set_xticks(COUNTS[::2], [str(n) for n in COUNTS[::2]])
        return figure


def signal_and_crosstalk(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output of each key, signal v|k|², predicted cross-talk), all [memories, n, V]."""
    out, k, v = read(write(k, v), k)[:, :, 0], k[:, :, 0], v[:, :, 0]
    overlap = k @ k.mT * (1 - torch.eye(k.shape[1]))
    return out, v * k.square().sum(-1, keepdim=True), overlap @ v


def pairs_at_unit_noise(noise: Tensor) -> float:
    """The number of pairs at which the noise is 1, interpolated between COUNTS on logarithmic scales."""
    x, y = torch.tensor(COUNTS).double().log(), noise.log()
    i = int((y >= 0).int().argmax())
    return float((x[i - 1] - y[i - 1] * (x[i] - x[i - 1]) / (y[i] - y[i - 1])).exp())


TOKENS, RESET = 64, 40


@dataclass
class Forgetting:
    """Forgetting: the weight of a write is the product of all later decays, per head or per key channel. Decay does not
    prevent that a pair written twice is read as more than its value."""

    by_age: dict[str, tuple[Tensor, Tensor]]  # decay -> (predicted, measured) weight, by age of the write
    by_channel: Check
    repeated: Check

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        random = 0.7 + 0.3 * torch.rand(TOKENS, generator=generator, dtype=torch.float64)
        rates = {
            "α = 0.99": full(0.99, TOKENS).log(),
            "α = 0.9": full(0.9, TOKENS).log(),
            "random α per token, 0.7 to 1": random.log(),
            "reset at one token": torch.where(torch.arange(TOKENS) == RESET, -7.0, -0.02).double(),
        }
        by_age = {name: weight_by_age(log_decay) for name, log_decay in rates.items()}
        return cls(by_age, channel_decay(generator), decayed_repeat(generator, alpha=0.9))

    def checks(self) -> list[Check]:
        by_age = [
            check_equal(f"{name}: weight of a write = Πα", measured, predicted)
            for name, (predicted, measured) in self.by_age.items()
        ]
        return [*by_age, self.by_channel, self.repeated]

    def summary(self) -> str:
        half = {name: int((measured < 0.5).int().argmax()) or TOKENS for name, (_, measured) in self.by_age.items()}
        values = [f"{n} tokens ({name})" if n < TOKENS else f"over {n - 1} ({name})" for name, n in half.items()]
        return f"The weight of a write falls below 1/2 after {', '.join(values)}."

    def figure(self) -> Figure:
        figure, (ax,) = subplots(1, 6.4, 4.0)
        plot_prediction(
            ax, torch.arange(TOKENS), self.by_age, (BLUE, RED, GREEN, PURPLE), yscale="log", ylim=(1e-5, 1.5),
            xlabel="age of the write (tokens)", ylabel="weight of the write in the output",
        )  # fmt: skip
        return figure


def weight_by_age(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """(product of all decays after a write, weight of the write in the output), both [T] by age of the write."""
    T, key = len(log_decay), torch.ones(1, len(log_decay), 1, 1).double()
    measured = attention_weights(key[:, :1], key, log_decay=log_decay.view(1, T, 1))[0, 0, 0]
    predicted = torch.stack([log_decay[j + 1 :].sum().exp() for j in range(T)])
    return predicted.flip(0), measured.flip(0)


def channel_decay(generator: Generator) -> Check:
    channels = -torch.rand(1, TOKENS, 1, K, generator=generator, dtype=torch.float64)
    keys, q = normal(generator, 1, TOKENS, 1, K), normal(generator, 1, 1, 1, K)
    since = channels.flip(1).cumsum(1).flip(1) - channels
    predicted = (q * since.exp() * keys).sum(-1)[0, :, 0]
    measured = attention_weights(q, keys, log_decay=channels)[0, 0, 0]
    return check_equal("decay per key channel: weight = q · (Πα ⊙ k)", measured, predicted)


def decayed_repeat(generator: Generator, alpha: float) -> Check:
    k, v = unit_vectors(generator, 1, 1, 1, K), normal(generator, 1, 1, 1, V)
    state = write(k.expand(1, 2, 1, K), v.expand(1, 2, 1, V), log_decay=full(alpha, 1).log())
    return check_equal(f"α = {alpha:g}: output of a pair written twice = (1 + α) v", read(state, k), (1 + alpha) * v)
