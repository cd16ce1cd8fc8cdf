"""How many pairs each mixer of the zoo holds: with its own keys, decays, gates and write strengths, n ≲ d_k."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor, nn

from ... import layers, zoo
from ...ops.recurrence import linear_attention
from .base import BLUE, RED, Row, draw, panels
from .capacity import recognised

WIDTH, BATCH, SEEDS = 32, 4, 3
COUNTS = (2, 4, 8, 16, 32, 64, 128, 256)
LOOKS = ((BLUE, "o", "plain"), (RED, "D", "heads compete"))


class Held(NamedTuple):
    """Of one mixer, over the rows d_k of a head's memory."""

    pairs: float  # n R² at the largest n: what is read, as so many pairs read without error
    half: float  # the number of pairs of which it recognises half
    noise: float  # the most that cross-talk of random keys leaves room to recognise: d_v / (2 ln n)


@dataclass
class Backbones:
    """Capacity by mixer: no mixer of the zoo, with its first weights, reads more than d_k random values back, with or
    without competition; half of the values are recognised up to a number that differs between them."""

    held: dict[str, tuple[Held, Held]]  # by mixer: (plain, with competition)

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        seeds = seeds_of(generator, SEEDS)
        return cls({name: (held_by(name, seeds), held_by(f"softmax-{name}", seeds)) for name in zoo.LINEAR})

    @property
    def names(self) -> list[str]:
        return sorted(self.held, key=lambda name: self.held[name][0].half)

    def changed(self, low: float, high: float) -> list[str]:
        """Those of which competition recognises from `low` to `high` times as many."""
        return [name for name in self.names if low < self.held[name][1].half / self.held[name][0].half < high]

    def laws(self) -> list[Row]:
        both = {name: plain for name, (plain, _) in self.held.items()}
        both |= {f"softmax-{name}": competing for name, (_, competing) in self.held.items()}
        half = {name: held.half / held.noise for name, held in both.items()}
        return [
            *(Row(f"{name}: pairs read back over d_k", held.pairs, "≤", 1.1) for name, held in both.items()),
            *(Row(f"{name}: half recognised, over what noise allows", x, "≤", 1.25) for name, x in half.items()),
        ]

    def sentence(self) -> str:
        pairs = {name: plain.pairs for name, (plain, _) in self.held.items()}
        most, first, last = max(pairs, key=lambda name: pairs[name]), self.names[0], self.names[-1]
        more, less = self.changed(1.1, math.inf), self.changed(0, 0.9)
        return (
            f"Of {COUNTS[-1]} random values at most {pairs[most]:.2f} d_k are read back ({most}); half of the values "
            f"are recognised up to {self.held[first][0].half:.2g} ({first}) to {self.held[last][0].half:.2g} ({last}) "
            f"pairs per row, and with random scores competition raises that by more than a tenth in {len(more)} of "
            f"{len(self.names)} ({', '.join(more) or 'none'}) and lowers it by as much in {len(less)}."
        )

    def figure(self) -> Figure:
        figure, (left, right) = panels(2, 5.4, 4.6)
        for ax, field in ((left, "pairs"), (right, "half")):
            for i, (colour, mark, label) in enumerate(LOOKS):
                x = [getattr(self.held[name][i], field) for name in self.names]
                ax.plot(x, range(len(x)), mark, color=colour, ms=7, label=label)
            ax.axvline(1, color="#333", ls=":", label="as many as rows")
        left.set(xlabel=f"read back of {COUNTS[-1]} pairs (n R²) / rows d_k")
        right.set(xscale="log", xlabel="pairs half of which are recognised / rows d_k")
        left.set_yticks(range(len(self.names)), self.names)
        right.set_yticks(range(len(self.names)), [])
        right.legend(fontsize=8, loc="lower right")
        return figure


def held_by(name: str, seeds: list[int]) -> Held:
    layers = [first_weights(name, WIDTH, seed) for seed in seeds]
    found = [[read_back(layer, n, seed) for layer, seed in zip(layers, seeds, strict=True)] for n in COUNTS]
    explained, known = torch.tensor(found).mean(1).unbind(1)
    call = passed(layers[0], torch.zeros(1, 2, WIDTH, dtype=torch.float64), 0)
    rows, numbers = call.k.shape[-1], call.v.shape[2:].numel()
    pairs = halfway(known.tolist())
    return Held(COUNTS[-1] * float(explained[-1]) / rows, pairs / rows, numbers / (2 * math.log(pairs)))


def halfway(known: list[float]) -> float:
    """The count at which the share of COUNTS falls to a half, on a logarithmic scale."""
    i = next((i for i, share in enumerate(known) if share < 0.5), len(COUNTS) - 1)
    part = (known[i - 1] - 0.5) / (known[i - 1] - known[i]) if i else 0.0
    return COUNTS[max(i - 1, 0)] * 2**part


def read_back(layer: nn.Module, n: int, seed: int) -> tuple[float, float]:
    """(R² of n values by what their keys read, each head's best scale allowed; share of the values recognised)."""
    x = draw(torch.Generator().manual_seed(seed + n), BATCH, n, WIDTH)
    k, v, gate, memory, normalise = passed(layer, x, seed)
    out = linear_attention(k, 0 * k, 0 * v, initial_state=memory, normalise=normalise, read_gate=gate)[0]
    inner, sizes = (out * v).sum((1, 3)), out.square().sum((1, 3)) * v.square().sum((1, 3))
    explained = inner.square() / sizes.clamp(min=torch.finfo(v.dtype).tiny)
    return float(explained.mean()), float(recognised(out.flatten(2), v.flatten(2)).mean())


class Passed(NamedTuple):
    """A layer's pass over x, with random values in place of its own."""

    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    gate: Tensor | None  # of writing [B, T, H]
    memory: Tensor  # [B, H, K, V]
    normalise: bool


def passed(layer: Any, x: Tensor, seed: int) -> Passed:
    """A layer's own values would be known from its keys, since both are made of x: memory would not be needed."""
    calls: list[dict[str, Any]] = []
    generator = torch.Generator().manual_seed(seed)

    def noted(q: Tensor, k: Tensor, v: Tensor, **arguments: Any):
        calls.append({"k": k, "v": draw(generator, *v.shape), **arguments})
        return linear_attention(q, k, calls[-1]["v"], **arguments)

    layer.op = noted
    memory = layer(x)[1].memory
    # residual-delta calls it for each chunk, the last of which may be longer than what is left of x
    k, v, gate = (
        None if calls[0].get(part) is None else torch.cat([call[part] for call in calls], 1)[:, : x.shape[1]]
        for part in ("k", "v", "write_gate")
    )
    assert k is not None and v is not None
    return Passed(k, v, gate, memory, calls[0]["normalise"])


def first_weights(name: str, D: int, seed: int) -> nn.Module:
    """A layer as it begins, but with random scores for its competition: X and softmax-X have the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = layers.build(zoo.get(name), hidden_size=D, num_heads=2).double()
        for path, parameter in layer.named_parameters():
            if "competition" in path:
                parameter.normal_()
    return layer


def seeds_of(generator: Generator, count: int) -> list[int]:
    return torch.randint(2**31, (count,), generator=generator).tolist()
