"""The difference between the scores of two mixers, paired by seed, with its 95 % confidence interval."""

import statistics
from dataclasses import dataclass, replace
from typing import Any

from ... import zoo
from ...report.numbers import count, half_interval
from ...spec.attention import AttentionSpec
from ...spec.linear import MixerSpec
from ...spec.serialise import Spec
from .summary import Comparison, Contender, show


@dataclass(frozen=True)
class Difference:
    """The gain of mixer a over mixer b. Both train on the same rows for a seed, so scores are paired by seed."""

    a: Contender
    b: Contender

    @property
    def gains(self) -> list[float]:
        sign = 1 if self.a.metric.higher_is_better else -1
        return [sign * (self.a.by_seed[s] - self.b.by_seed[s]) for s in self.a.by_seed if s in self.b.by_seed]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.gains)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the mean gain, by Student's t over seeds; (−∞, ∞) for a single seed."""
        half = half_interval(self.gains)
        return self.mean - half, self.mean + half

    @property
    def better(self) -> bool:
        return self.interval[0] > 0

    @property
    def worse(self) -> bool:
        return self.interval[1] < 0

    def __str__(self) -> str:
        a, b, n = self.a.label, self.b.label, len(self.gains)
        if (solved := self.a.metric.solved) is not None and min(self.a.mean, self.b.mean) >= solved:
            both = f"{show(self.a.metric, self.a.mean)} and {show(self.b.metric, self.b.mean)}"
            return f"{a} and {b} both solve the task ({both}); it is too easy to tell them apart"
        if n == 1:
            ahead = f"{'ahead of' if self.mean > 0 else 'behind'} {b} by {self._size(abs(self.mean))}"
            return f"{a} is {ahead} in one seed, which is too few to tell them apart"
        low, high = sorted(abs(end) for end in self.interval)
        if self.better or self.worse:
            by = f"{'better' if self.better else 'worse'} than {b} by {self._size(abs(self.mean))}"
            return f"{a} is {by} (95 % interval {self._number(low)} to {self._number(high)}, {count(n, 'seed')})"
        low, high = self.interval
        interval = f"95 % interval of the gain {self._number(low)} to {self._size(high)}, {count(n, 'seed')}"
        return f"no clear difference between {a} and {b} ({interval})"

    def _number(self, gain: float) -> str:
        metric = self.a.metric
        return f"{gain * metric.scale:.{metric.digits}f}".replace("-", "−")

    def _size(self, gain: float) -> str:
        unit = self.a.metric.unit
        return f"{self._number(gain)} {'points' if unit == '%' else unit}"


def competing(comparison: Comparison) -> list[Contender]:
    """Finished mixers whose heads compete; those with sigmoid or shuffled gates are controls and left out."""
    alone = ({"activation": "sigmoid"}, {"shuffle": True})
    controls = lambda spec: (zoo.plain(spec), *(with_gates(spec, **gates) for gates in alone))  # noqa: E731
    return [c for c in comparison.finished_in_order if c.spec not in controls(c.spec)]


def find(comparison: Comparison, spec: Spec) -> Contender | None:
    return next((c for c in comparison.finished if c.spec == spec), None)


def with_gates(spec: Spec, **changes: Any) -> Spec:
    """The spec with changes of the fields of every competition."""

    def changed(mixer: MixerSpec) -> MixerSpec:
        gate = mixer.competition
        return mixer if gate is None else replace(mixer, competition=replace(gate, **changes))

    return zoo.each_mixer(spec, changed)


def without_count(spec: Spec) -> Spec:
    """The spec with its own number of heads unset."""
    if isinstance(spec, MixerSpec):
        return replace(spec, heads=replace(spec.heads, count=None))
    return replace(spec, count=None) if isinstance(spec, AttentionSpec) else spec


def common_seeds(*contenders: Contender) -> bool:
    return bool(set.intersection(*(set(c.by_seed) for c in contenders)))


def pairs(comparison: Comparison) -> list[Difference]:
    """The difference between each mixer with competing heads and its backbone, if they share a seed."""
    found = [(c, find(comparison, zoo.plain(c.spec))) for c in competing(comparison)]
    return [Difference(c, base) for c, base in found if base and common_seeds(c, base)]
