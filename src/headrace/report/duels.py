"""Who is compared with whom, and by how much one is better than the other."""

import math
import statistics
from dataclasses import dataclass, replace

from .. import zoo
from ..spec import AttentionSpec, MixerSpec, Spec, change
from .summary import Comparison, Contender


@dataclass(frozen=True)
class Difference:
    """How much better a is than b, seed by seed."""

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
    def clear(self) -> bool:
        """More than the spread over seeds, all of which agree."""
        spread = math.sqrt((self.a.spread**2 + self.b.spread**2) / 2)
        return abs(self.mean) > spread and (min(self.gains) > 0 or max(self.gains) < 0)

    @property
    def better(self) -> bool:
        return self.clear and self.mean > 0

    @property
    def worse(self) -> bool:
        return self.clear and self.mean < 0

    def verdict(self) -> str:
        wins, n, solved = sum(gain > 0 for gain in self.gains), len(self.gains), self.a.metric.solved
        if solved is not None and min(self.a.mean, self.b.mean) >= solved:
            return "both solve the task, which is too easy to tell them apart"
        if n == 1:
            return f"{'better' if wins else 'no better'} in the only seed, which is a hint and no finding"
        if self.clear:
            return f"every seed {'better' if self.better else 'worse'}"
        return f"no difference beyond the spread over seeds (better in {wins} of {n})"


def gated(comparison: Comparison) -> list[Contender]:
    return [c for c in comparison.contenders if c.by_seed and isinstance(c.spec, MixerSpec) and c.spec.competition]


def competing(comparison: Comparison) -> list[Contender]:
    """Contenders whose heads compete; sigmoid gates do not."""
    return [c for c in gated(comparison) if c.spec.competition.activation != "sigmoid"]  # type: ignore[union-attr]


def find(comparison: Comparison, spec: Spec) -> Contender | None:
    return next((c for c in comparison.finished if c.spec == spec), None)


def as_control(spec: Spec) -> Spec:
    """The same gates, each of them by itself."""
    return change(spec, "competition.activation", "sigmoid")


def without_count(spec: Spec) -> Spec:
    if isinstance(spec, MixerSpec):
        return replace(spec, heads=replace(spec.heads, count=None))
    return replace(spec, count=None) if isinstance(spec, AttentionSpec) else spec


def common_seeds(*contenders: Contender) -> bool:
    return bool(set.intersection(*(set(c.by_seed) for c in contenders)))


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("s" if n != 1 else "")


def pairs(comparison: Comparison) -> list[tuple[Contender, Contender]]:
    """Contenders whose heads compete, each with its backbone."""
    found = [(winner, find(comparison, zoo.plain(winner.spec))) for winner in competing(comparison)]
    return [(winner, base) for winner, base in found if base and common_seeds(winner, base)]
