"""The difference between the scores of two mixers, paired by seed, with its 95 % confidence interval."""

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ... import zoo
from ...spec.attention import AttentionSpec
from ...spec.linear import MixerSpec
from ...spec.serialize import Spec
from .. import stats
from ..report.numbers import count, seeds_of
from .summary import Comparison, Contender, show


@dataclass(frozen=True)
class Difference:
    """The gain of mixer a over mixer b. Both train on the same rows for a seed, so scores are paired by seed."""

    a: Contender
    b: Contender

    @property
    def seeds(self) -> list[int]:
        """The seeds in which neither diverged."""
        return [seed for seed in self.a.by_seed if seed in self.b.by_seed]

    @property
    def gains(self) -> list[float]:
        sign = 1 if self.a.metric.higher_is_better else -1
        return [sign * (self.a.by_seed[seed] - self.b.by_seed[seed]) for seed in self.seeds]

    @property
    def gain(self) -> stats.Mean:
        return stats.mean_over_seeds(self.gains)

    @property
    def means(self) -> tuple[float, float]:
        """The mean scores of a and b over the seeds of the difference."""
        a, b = (fmean(c.by_seed[seed] for seed in self.seeds) for c in (self.a, self.b))
        return a, b

    @property
    def verdict(self) -> str:
        """ "better", "worse", "too few seeds" or "no clear difference"."""
        if self.gain.n < stats.SEEDS:
            return "too few seeds"
        return {1: "better", -1: "worse", 0: "no clear difference"}[self.gain.sign]

    @property
    def lost(self) -> set[int]:
        """The seeds in which a or b diverged."""
        return {*self.a.lost, *self.b.lost}

    def __str__(self) -> str:
        a, b, gain, seeds = self.a.label, self.b.label, self.gain.value, self._seeds()
        size = self._size(abs(gain))
        if (solved := self.a.metric.solved) is not None and min(self.means) >= solved:
            return f"{a} and {b} both solve the task ({self._means()}, {seeds}); it is too easy to tell them apart"
        if self.verdict == "too few seeds":
            ahead = f"{'ahead of' if gain > 0 else 'behind'} {b} by {size}" if gain else f"equal to {b}"
            return f"{a} is {ahead} in {seeds}, which is too few to tell them apart"
        low, high = self.gain.interval
        if self.verdict in ("better", "worse"):
            near, far = sorted((abs(low), abs(high)))
            interval = f"95 % interval {self._number(near)} to {self._number(far)}"
            return f"{a} is {self.verdict} than {b} by {size} ({interval}, {seeds})"
        interval = f"95 % interval of the gain {self._number(low)} to {self._size(high)}"
        if math.isinf(high):
            interval = f"the gain is {self._size(gain)} in each seed, and they are too few without a spread"
        return f"no clear difference between {a} and {b} ({interval}, {seeds})"

    def _seeds(self) -> str:
        """How many seeds the difference is over and, if one diverged, the means over these."""
        number = few(self.gain.n)
        if not self.lost:
            return number
        return f"{seeds_of(self.gain.n, len(self.lost))} in which neither diverged, with means of {self._means()}"

    def _means(self) -> str:
        a, b = (show(self.a.metric, mean) for mean in self.means)
        return f"{a} and {b}"

    def _number(self, gain: float) -> str:
        metric = self.a.metric
        return f"{gain * metric.scale:.{metric.digits}f}".replace("-", "−")

    def _size(self, gain: float) -> str:
        return f"{self._number(gain)} {self._unit}"

    @property
    def _unit(self) -> str:
        return "points" if self.a.metric.unit == "%" else self.a.metric.unit


def few(seeds: int) -> str:
    return "one seed" if seeds == 1 else count(seeds, "seed")


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
    pairs = [(c, find(comparison, zoo.plain(c.spec))) for c in competing(comparison)]
    return [Difference(c, base) for c, base in pairs if base and common_seeds(c, base)]
