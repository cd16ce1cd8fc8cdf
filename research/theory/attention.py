"""What attention needs that a recurrence does not: a scale of its logits, positions, and a cache that grows."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from headrace import zoo
from headrace.history.layers.distance import bucket
from headrace.layers.blocks.stack import sinusoidal
from headrace.layers.rotary import DEFAULT, angles, rotate

from .base import (
    BLUE,
    GREEN,
    PURPLE,
    RED,
    YELLOW,
    Check,
    check_equal,
    entropy,
    normal,
    plot_lines,
    plot_prediction,
    softmax_weights,
    subplots,
)  # fmt: skip

WIDTHS, KEYS, QUERIES = torch.tensor([4, 8, 16, 32, 64, 128, 256, 512]), 64, 256


@dataclass
class LogitScale:
    """Scale of the logits: q·k of independent entries has the variance d. Without 1/√d the softmax becomes one-hot as d
    grows; with it the entropy does not depend on d (arXiv 1706.03762, section 3.2.1)."""

    variance: Tensor  # of q·k, over d [widths]
    scaled: Tensor  # entropy of the weights, over its maximum, with 1/√d [widths]
    unscaled: Tensor  # the same without

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        rows = []
        for d in WIDTHS.tolist():
            q, k = normal(generator, 1, QUERIES, 1, d), normal(generator, 1, KEYS, 1, d)
            logits = torch.einsum("bthd,blhd->bhtl", q, k)
            rows.append([logits.var() / d, *(entropy(softmax_weights(x, k)).mean() for x in (q, q * d**0.5))])
        return cls(*torch.tensor(rows, dtype=torch.float64).unbind(1))

    def checks(self) -> list[Check]:
        return [
            Check("variance of q·k over d: largest distance from 1", float((self.variance - 1).abs().max()), "≤", 0.2),
            Check("with 1/√d: entropy varies by", float(self.scaled.max() - self.scaled.min()), "≤", 0.1),
            Check(f"without, d = {WIDTHS[-1]}: entropy", float(self.unscaled[-1]), "≤", 0.1),
        ]

    def summary(self) -> str:
        first, last = int(WIDTHS[0]), int(WIDTHS[-1])
        return (
            f"From d = {first} to {last} the entropy of the weights of {KEYS} keys, over its maximum, falls from "
            f"{self.unscaled[0]:.2f} to {self.unscaled[-1]:.2f} without 1/√d, and is {self.scaled.min():.2f} to "
            f"{self.scaled.max():.2f} with it."
        )

    def figure(self) -> Figure:
        figure, (ax,) = subplots(1, 6.4)
        plot_lines(
            ax, WIDTHS, {"with 1/√d": self.scaled, "without": self.unscaled}, (BLUE, RED), xscale="log", ylim=(0, 1.05),
            xlabel="channels of a head, d", ylabel="entropy of the weights, over its maximum",
        )  # fmt: skip
        return figure


DISTANCES, WIDTH, SHIFT, BUCKETS, HEADS = torch.arange(257), 128, 1000, 32, 4


@dataclass
class Positions:
    """Positions: the inner product of two sinusoids, a rotated q·k, T5's bias and RetNet's decay depend on the distance
    of two tokens alone."""

    sinusoids: Tensor  # PE · PE' over PE · PE, by distance [n]
    rotated: Tensor  # logit of two equal vectors by distance, over that at 0 [n]
    buckets: Tensor  # T5's bucket by distance [n]
    decays: Tensor  # RetNet's γ^distance [heads, n]
    moved: list[Check]

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        embedded = sinusoidal(torch.arange(SHIFT + len(DISTANCES)), WIDTH).double()
        first, later = embedded[: len(DISTANCES)], embedded[SHIFT : SHIFT + len(DISTANCES)]
        products, products_later = first @ first[0], later @ later[0]
        x = normal(generator, 1, 1, 1, WIDTH)
        logits, logits_later = rotary_logits(x, 0), rotary_logits(x, SHIFT)
        off = float((products - products_later).abs().max() / products[0])
        moved = [
            Check(f"sinusoids, {SHIFT:,} tokens later: change of PE · PE'", off, "≤", 1e-5),  # they are float32
            check_equal(f"rotary, {SHIFT:,} tokens later: the logit is the same", logits_later, logits),
        ]
        gammas = 1 - 2.0 ** (-5 - torch.arange(HEADS).double())
        decays = gammas[:, None] ** DISTANCES
        return cls(products / products[0], logits / logits[0], bucket(DISTANCES, BUCKETS).double(), decays, moved)

    def checks(self) -> list[Check]:
        return self.moved

    def summary(self) -> str:
        own = int((self.buckets.diff() == 0).int().argmax())
        last = int((self.buckets == BUCKETS - 1).int().argmax())
        half = [int((decay < 0.5).int().argmax()) for decay in self.decays]
        return (
            f"T5's {BUCKETS} buckets tell distances up to {own} tokens apart, and have one for all from {last}. The "
            f"decay of RetNet's first head falls below 1/2 after {half[0]} tokens, of its {HEADS}th after {half[-1]}."
        )

    def figure(self) -> Figure:
        figure, (left, middle, right) = subplots(3, 3.9)
        lines = {"sinusoids: PE · PE'": self.sinusoids, "rotary: q·k of equal vectors": self.rotated}
        plot_lines(left, DISTANCES, lines, (BLUE, RED), xlabel="distance in tokens", ylabel="over that at 0")
        decays = {f"head {h}": decay for h, decay in enumerate(self.decays)}
        plot_lines(
            middle, DISTANCES, decays, (BLUE, RED, YELLOW, GREEN), xlabel="distance in tokens",
            ylabel="RetNet's decay γ^distance", ylim=(0, 1.05),
        )  # fmt: skip
        plot_lines(
            right, DISTANCES, {"T5": self.buckets}, (PURPLE,), xlabel="distance in tokens",
            ylabel="bucket, with a learned bias each",
        )  # fmt: skip
        return figure


def rotary_logits(x: Tensor, start: int) -> Tensor:
    """The logits [n] of x at position `start` with x at DISTANCES after it."""
    positions = (start + DISTANCES)[None]
    turn = angles(positions, DEFAULT, 10000.0, WIDTH)
    turned = rotate(x.expand(1, len(DISTANCES), 1, WIDTH), turn)[0, :, 0]
    return turned @ turned[0]


TOKENS = 2 ** torch.arange(4, 19)
SHOWN = {"transformer": BLUE, "gqa": RED, "mqa": YELLOW, "mla": PURPLE, "retnet": GREEN, "gla": "#333"}
MODEL = 1024  # its width


@dataclass
class KVCache:
    """KV cache: softmax attention keeps every key and value. Sharing them among heads divides the cache by
    their number; a recurrence has a state of one size."""

    numbers: dict[str, Tensor]  # mixer -> numbers kept by a layer, at each of TOKENS

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        return cls({name: torch.tensor([kept(name, HEADS, int(t)) for t in TOKENS]).double() for name in SHOWN})

    def checks(self) -> list[Check]:
        attention, shared, state = (self.numbers[name] for name in ("transformer", "mqa", "gla"))
        return [
            check_equal(f"mqa: 1/{HEADS} of the cache", shared, attention / HEADS),
            check_equal("transformer: the cache is linear in the tokens", attention, attention[0] * TOKENS / TOKENS[0]),
            check_equal("gla: the state has one size", state, state[:1].expand(len(TOKENS))),
        ]

    def summary(self) -> str:
        last = {name: f"{own[-1] / 2**20:,.3g}" for name, own in self.numbers.items()}
        return (
            f"After {int(TOKENS[-1]):,} tokens a layer of width {MODEL:,} with {HEADS} heads keeps, in millions (2²⁰) "
            f"of numbers, {', '.join(f'{value} ({name})' for name, value in last.items())}."
        )

    def figure(self) -> Figure:
        figure, (ax,) = subplots(1, 6.4)
        plot_lines(
            ax, TOKENS, self.numbers, list(SHOWN.values()), xscale="log", yscale="log", xlabel="tokens read",
            ylabel=f"numbers kept by a layer of width {MODEL:,}",
        )  # fmt: skip
        return figure


def kept(name: str, heads: int, tokens: int) -> int:
    """The numbers that a layer keeps after so many tokens."""
    spec = zoo.get(name)
    sizes = (MODEL, heads, tokens) if spec.facts.cached else (MODEL, heads)
    return sum(math.prod(shape) for shape in spec.state_shapes(*sizes).values())


@dataclass
class Compression:
    """Compression: the cache of softmax attention over the state of linear attention is t (d_k + d_v) / (d_k d_v),
    which is 2t/d for equal sizes."""

    ratios: dict[int, Tensor]  # d -> cache over state, at each of TOKENS

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        ratios = {}
        for heads in (4, 8, 16):
            cache = torch.tensor([kept("transformer", heads, int(t)) for t in TOKENS]).double()
            ratios[MODEL // heads] = cache / kept("simple-gla", heads, 0)
        return cls(ratios)

    def checks(self) -> list[Check]:
        return [
            check_equal(f"d = {d}: cache over state = 2t/d", ratio, 2 * TOKENS / d) for d, ratio in self.ratios.items()
        ]

    def summary(self) -> str:
        at = {d: float(ratio[-1]) for d, ratio in self.ratios.items()}
        said = ", ".join(f"{ratio:,.0f} (d = {d})" for d, ratio in at.items())
        return f"After {int(TOKENS[-1]):,} tokens the cache of a layer is so many times as large as the state: {said}."

    def figure(self) -> Figure:
        figure, (ax,) = subplots(1, 6.4)
        pairs = {f"d = {d}": (2 * TOKENS / d, ratio) for d, ratio in self.ratios.items()}
        plot_prediction(
            ax, TOKENS, pairs, (BLUE, RED, GREEN), xscale="log", yscale="log", xlabel="tokens read, t",
            ylabel="KV cache over state, 2t/d",
        )  # fmt: skip
        ax.axhline(1, color="#888", lw=1, ls="--")
        return figure
