"""Capacity of each mixer of the zoo, with the keys, decays, gates and write strengths of its initialized layer."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor, nn

from headrace import layers, zoo
from headrace.ops.attention import linear_attention

from .base import BLUE, MIXERS, RED, Check, normal, subplots
from .capacity import is_nearest

WIDTH, BATCH, SEEDS = 32, 4, 3
COUNTS = (2, 4, 8, 16, 32, 64, 128, 256)
MARKERS = ((BLUE, "o", "without competition"), (RED, "D", "with head competition"))


class RecallLimits(NamedTuple):
    """Limits of one mixer, in pairs per row d_k of a head's memory."""

    recovered: float  # n R² at the largest n: the equivalent number of pairs recovered without error
    half: float  # the number of pairs at which the retrieval accuracy falls to 1/2
    bound: float  # upper bound of `half` from the cross-talk of random keys: d_v / (2 ln n)


@dataclass
class MixerCapacity:
    """Capacity by mixer: none of the initialized mixers recovers more than d_k random values, with or without head
    competition. The number of pairs at which the retrieval accuracy falls to 1/2 differs between mixers."""

    limits: dict[str, tuple[RecallLimits, RecallLimits]]  # mixer -> (without, with head competition)

    @classmethod
    def measure(cls, generator: Generator) -> Self:
        seeds = draw_seeds(generator, SEEDS)
        return cls({name: (measure_mixer(name, seeds), measure_mixer(f"softmax-{name}", seeds)) for name in MIXERS})

    @property
    def names(self) -> list[str]:
        return sorted(self.limits, key=lambda name: self.limits[name][0].half)

    def changed(self, low: float, high: float) -> list[str]:
        """The mixers whose `half` competition multiplies by a factor between `low` and `high`."""
        return [name for name in self.names if low < self.limits[name][1].half / self.limits[name][0].half < high]

    def checks(self) -> list[Check]:
        both = {name: plain for name, (plain, _) in self.limits.items()}
        both |= {f"softmax-{name}": competing for name, (_, competing) in self.limits.items()}
        half = {name: limits.half / limits.bound for name, limits in both.items()}
        return [
            *(Check(f"{name}: recovered pairs / d_k", limits.recovered, "≤", 1.1) for name, limits in both.items()),
            *(Check(f"{name}: pairs at accuracy 1/2, over their bound", x, "≤", 1.25) for name, x in half.items()),
        ]

    def summary(self) -> str:
        recovered = {name: plain.recovered for name, (plain, _) in self.limits.items()}
        most, first, last = max(recovered, key=lambda name: recovered[name]), self.names[0], self.names[-1]
        more, less = self.changed(1.1, math.inf), self.changed(0, 0.9)
        return (
            f"Of {COUNTS[-1]} random values, at most {recovered[most]:.2f} d_k are recovered ({most}). The retrieval "
            f"accuracy falls to 1/2 at {self.limits[first][0].half:.2g} ({first}) to "
            f"{self.limits[last][0].half:.2g} ({last}) pairs per row. Head competition with random scores raises this "
            f"number by more than 10 % in {len(more)} of {len(self.names)} mixers ({', '.join(more) or 'none'}) and "
            f"lowers it by more than 10 % in {len(less)}."
        )

    def figure(self) -> Figure:
        figure, (left, right) = subplots(2, 5.4, 4.6)
        for ax, field in ((left, "recovered"), (right, "half")):
            for i, (colour, marker, label) in enumerate(MARKERS):
                x = [getattr(self.limits[name][i], field) for name in self.names]
                ax.plot(x, range(len(x)), marker, color=colour, ms=7, label=label)
            ax.axvline(1, color="#333", ls=":", label="d_k pairs")
        left.set(xlabel=f"recovered of {COUNTS[-1]} pairs (n R²) / rows d_k")
        right.set(xscale="log", xlabel="pairs at retrieval accuracy 1/2 / rows d_k")
        left.set_yticks(range(len(self.names)), self.names)
        right.set_yticks(range(len(self.names)), [])
        right.legend(fontsize=8, loc="lower right")
        return figure


def measure_mixer(name: str, seeds: list[int]) -> RecallLimits:
    layers = [initial_layer(name, WIDTH, seed) for seed in seeds]
    found = [[recall(layer, n, seed) for layer, seed in zip(layers, seeds, strict=True)] for n in COUNTS]
    explained, accuracy = torch.tensor(found).mean(1).unbind(1)
    call = record_call(layers[0], torch.zeros(1, 2, WIDTH, dtype=torch.float64), 0)
    rows, value_size = call.k.shape[-1], call.v.shape[2:].numel()
    pairs = count_at_half(accuracy.tolist())
    return RecallLimits(COUNTS[-1] * float(explained[-1]) / rows, pairs / rows, value_size / (2 * math.log(pairs)))


def count_at_half(accuracy: list[float]) -> float:
    """The number of pairs at which the accuracy falls to 1/2, interpolated between COUNTS on a logarithmic scale."""
    i = next((i for i, value in enumerate(accuracy) if value < 0.5), len(COUNTS) - 1)
    part = (accuracy[i - 1] - 0.5) / (accuracy[i - 1] - accuracy[i]) if i else 0.0
    return COUNTS[max(i - 1, 0)] * 2**part


def recall(layer: nn.Module, n: int, seed: int) -> tuple[float, float]:
    """(R² of n values predicted by the outputs of their keys, with the best scale per head; retrieval accuracy)."""
    x = normal(torch.Generator().manual_seed(seed + n), BATCH, n, WIDTH)
    k, v, gate, memory, normalize = record_call(layer, x, seed)
    out = linear_attention(k, 0 * k, 0 * v, initial_state=memory, normalize=normalize, read_gate=gate)[0]
    inner, sizes = (out * v).sum((1, 3)), out.square().sum((1, 3)) * v.square().sum((1, 3))
    explained = inner.square() / sizes.clamp(min=torch.finfo(v.dtype).tiny)
    return float(explained.mean()), float(is_nearest(out.flatten(2), v.flatten(2)).mean())


class LayerCall(NamedTuple):
    """The arguments and final state of a layer's call of `linear_attention`, with random values."""

    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, H, V]
    gate: Tensor | None  # write gate [B, T, H]
    memory: Tensor  # [B, H, K, V]
    normalize: bool


def record_call(layer: Any, x: Tensor, seed: int) -> LayerCall:
    """Runs a layer on x [B, T, D] and records its call of `linear_attention`, with random values.

    The layer's own values are replaced because they and the keys are computed from the same x: they could be predicted
    from the keys without a memory."""
    calls: list[dict[str, Any]] = []
    generator = torch.Generator().manual_seed(seed)

    def recorder(q: Tensor, k: Tensor, v: Tensor, **arguments: Any):
        calls.append({"k": k, "v": normal(generator, *v.shape), **arguments})
        return linear_attention(q, k, calls[-1]["v"], **arguments)

    layer.op = recorder
    memory = layer(x)[1].memory
    # residual-delta calls the op once per chunk, and pads the last chunk
    k, v, gate = (
        None if calls[0].get(part) is None else torch.cat([call[part] for call in calls], 1)[:, : x.shape[1]]
        for part in ("k", "v", "write_gate")
    )
    assert k is not None and v is not None
    return LayerCall(k, v, gate, memory, calls[0]["normalize"])


def initial_layer(name: str, D: int, seed: int) -> nn.Module:
    """An initialized layer with random weights of the head competition. X and softmax-X share all other weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = layers.build(zoo.get(name), hidden_size=D, num_heads=2).double()
        for path, parameter in layer.named_parameters():
            if "competition" in path:
                parameter.normal_()
    return layer


def draw_seeds(generator: Generator, count: int) -> list[int]:
    return torch.randint(2**31, (count,), generator=generator).tolist()
