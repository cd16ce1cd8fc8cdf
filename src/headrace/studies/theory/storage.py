"""The laws of a memory that is a sum of pairs of a key and a value: what is read is known exactly (arXiv 2405.21060
for its decay)."""

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
    Row,
    compared,
    draw,
    exact,
    full,
    panels,
    read,
    unit,
    weights,
    written,
)

K, V = 16, 16
COUNTS = [2, 4, 8, 16, 32, 64, 128, 256, 512]
MEMORIES = 16  # to take a mean of


@dataclass
class Crosstalk:
    """Signal and cross-talk: what is read is v|k|² plus the other values by the overlap of their keys; the two are
    equal at as many pairs as the key has dimensions."""

    noise: dict[int, Tensor]  # by dimensions of the key: length of the cross-talk at each of COUNTS
    sums: list[Row]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        noise, sums = {}, []
        for d in (16, 64, 256):
            k, v = unit(generator, MEMORIES, COUNTS[-1], 1, d), unit(generator, MEMORIES, COUNTS[-1], 1, V)
            parts = [signal_and_crosstalk(k[:, :n], v[:, :n]) for n in COUNTS]
            noise[d] = torch.stack([(seen - signal).square().sum(-1).mean().sqrt() for seen, signal, _ in parts])
            seen, signal, cross = parts[-1]
            sums.append(exact(f"key of {d}: read-out = signal + cross-talk", seen, signal + cross))
        return cls(noise, sums)

    @property
    def law(self) -> dict[int, Tensor]:
        return {d: (torch.tensor(COUNTS).double() - 1).div(d).sqrt() for d in self.noise}

    def laws(self) -> list[Row]:
        off = {d: float((noise / self.law[d] - 1)[2:].abs().max()) for d, noise in self.noise.items()}
        said = "cross-talk's distance from √((n−1)/d), n ≥ 8"
        return [*self.sums, *(Row(f"key of {d}: {said}", value, "≤", 0.15) for d, value in off.items())]

    def sentence(self) -> str:
        said = ", ".join(f"{crossing(noise):.0f} pairs for a key of {d}" for d, noise in self.noise.items())
        return f"Cross-talk is as loud as the signal at {said}."

    def figure(self) -> Figure:
        figure, (ax,) = panels(1, 6.4, 4.0)
        ax.axhline(1, color="#333", ls="--", lw=1.6, label="signal")
        pairs = {f"cross-talk, key of {d}": (self.law[d], noise) for d, noise in self.noise.items()}
        compared(
            ax, torch.tensor(COUNTS), pairs, (BLUE, RED, YELLOW), xscale="log", yscale="log",
            xlabel="pairs n in one memory", ylabel="length of what is read (of values: 1)",
        )  # fmt: skip
        ax.set_xticks(COUNTS[::2], [str(n) for n in COUNTS[::2]])
        return figure


def signal_and_crosstalk(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(what is read by each key, v|k|², the other values by the overlap of their keys), all [memories, n, V]."""
    seen, k, v = read(written(k, v), k)[:, :, 0], k[:, :, 0], v[:, :, 0]
    overlap = k @ k.mT * (1 - torch.eye(k.shape[1]))
    return seen, v * k.square().sum(-1, keepdim=True), overlap @ v


def crossing(noise: Tensor) -> float:
    """The count at which cross-talk is 1, between two of COUNTS on a logarithmic scale."""
    x, y = torch.tensor(COUNTS).double().log(), noise.log()
    i = int((y >= 0).int().argmax())
    return float((x[i - 1] - y[i - 1] * (x[i] - x[i - 1]) / (y[i] - y[i - 1])).exp())


TOKENS, RESET = 64, 40


@dataclass
class Fading:
    """Forgetting: a write weighs the product of all decays since it, per head or per key channel; with a decay too a
    pair that is written twice is read as more than its value."""

    by_age: dict[str, tuple[Tensor, Tensor]]  # (the law, what is seen), by age of the write
    by_channel: Row
    twice: Row

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        random = 0.7 + 0.3 * torch.rand(TOKENS, generator=generator, dtype=torch.float64)
        rates = {
            "α = 0.99": full(0.99, TOKENS).log(),
            "α = 0.9": full(0.9, TOKENS).log(),
            "α of each token, 0.7 to 1": random.log(),
            "reset at one token": torch.where(torch.arange(TOKENS) == RESET, -7.0, -0.02).double(),
        }
        by_age = {name: faded(log_decay) for name, log_decay in rates.items()}
        return cls(by_age, faded_by_channel(generator), twice_written(generator, alpha=0.9))

    def laws(self) -> list[Row]:
        by_age = [exact(f"{name}: a write weighs Πα", seen, law) for name, (law, seen) in self.by_age.items()]
        return [*by_age, self.by_channel, self.twice]

    def sentence(self) -> str:
        half = {name: int((seen < 0.5).int().argmax()) or TOKENS for name, (_, seen) in self.by_age.items()}
        said = [f"{n} tokens ({name})" if n < TOKENS else f"over {n - 1} ({name})" for name, n in half.items()]
        return f"A write has lost half its weight after {', '.join(said)}."

    def figure(self) -> Figure:
        figure, (ax,) = panels(1, 6.4, 4.0)
        compared(
            ax, torch.arange(TOKENS), self.by_age, (BLUE, RED, GREEN, PURPLE), yscale="log", ylim=(1e-5, 1.5),
            xlabel="age of the write (tokens)", ylabel="its weight in what is read",
        )  # fmt: skip
        return figure


def faded(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """By age of a write: (the product of all decays since it, its weight in what is read)."""
    T, key = len(log_decay), torch.ones(1, len(log_decay), 1, 1).double()
    seen = weights(key[:, :1], key, log_decay=log_decay.view(1, T, 1))[0, 0, 0]
    law = torch.stack([log_decay[j + 1 :].sum().exp() for j in range(T)])
    return law.flip(0), seen.flip(0)


def faded_by_channel(generator: Generator) -> Row:
    channels = -torch.rand(1, TOKENS, 1, K, generator=generator, dtype=torch.float64)
    keys, q = draw(generator, 1, TOKENS, 1, K), draw(generator, 1, 1, 1, K)
    since = channels.flip(1).cumsum(1).flip(1) - channels
    law = (q * since.exp() * keys).sum(-1)[0, :, 0]
    return exact("a decay per key channel: q · (Πα ⊙ k)", weights(q, keys, log_decay=channels)[0, 0, 0], law)


def twice_written(generator: Generator, alpha: float) -> Row:
    k, v = unit(generator, 1, 1, 1, K), draw(generator, 1, 1, 1, V)
    state = written(k.expand(1, 2, 1, K), v.expand(1, 2, 1, V), log_decay=full(alpha, 1).log())
    return exact(f"α = {alpha:g}: a pair written twice reads (1 + α) v", read(state, k), (1 + alpha) * v)
