"""The differences between the mixers of a report, paired by seed and judged as one family.

Every difference that a report judges is in its table, and Holm's rule corrects p over all of them, in all comparisons,
so that a report over equal models calls a difference in at most 5 % of cases.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from statistics import fmean
from typing import Any

from .. import zoo
from ..report import stats
from ..report.numbers import out_of, seeds_of
from ..spec.attention import AttentionSpec
from ..spec.linear import MixerSpec
from ..spec.serialize import Spec
from .summary import Comparison, Contender

LEVEL = 0.05  # of the family: a difference has a verdict if its corrected p is below
HEADER = ("mixers", "seeds", "gain", "95 % interval", "p", "p by Holm", "verdict")
# Gates of controls: of the range of the softmax, and of the earlier default, which results of older versions have.
SIGMOIDS: tuple[dict[str, Any], ...] = ({"activation": "sigmoid"}, {"activation": "sigmoid", "range": 2.0})
VERDICTS = BETTER, WORSE, ALIKE, FEW, EASY = (
    "better", "worse", "not told apart", "too few seeds", "both solve the task",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """The gain of mixer a over mixer b, above 0 if a is better. Both train on the same rows for a seed, so scores are
    paired by seed.

    kind: why the two are compared: "backbone", "control", "heads", or "best" of those that do not belong together.
    corrected: p by Holm over the report's differences.
    """

    a: Contender
    b: Contender
    kind: str = "backbone"
    corrected: float = math.nan

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
    def p(self) -> float:
        return stats.paired(self.gains)

    @property
    def undecided(self) -> str | None:
        """Why the difference can have no verdict, or None."""
        solved = self.a.metric.solved
        if solved is not None and all(
            fmean(c.by_seed[seed] for seed in self.seeds) >= solved for c in (self.a, self.b)
        ):
            return EASY
        return FEW if len(self.seeds) < stats.SEEDS else None

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if (reason := self.undecided) is not None:
            return reason
        if not self.corrected < LEVEL:
            return ALIKE
        return BETTER if self.gain.value > 0 else WORSE

    @property
    def lost(self) -> int:
        """The number of seeds in which a or b diverged."""
        return len({*self.a.lost, *self.b.lost})

    def cells(self) -> list[str]:
        """Cells of a row under HEADER."""
        low, high = map(self._number, self.gain.interval)
        interval = "no interval" if math.isinf(self.gain.reach) else f"{low} to {high}"
        corrected = "–" if math.isnan(self.corrected) else f"{self.corrected:.2g}"
        names, seeds = f"{self.a.label} over {self.b.label}", out_of(self.gain.n, self.lost)
        return [names, seeds, self._size(self.gain.value), interval, f"{self.p:.2g}", corrected, self.verdict]

    def __str__(self) -> str:
        names, _, gain, interval, _, corrected, verdict = self.cells()
        said = [] if interval == "no interval" else [f"95 % interval {interval}"]
        said += [seeds_of(self.gain.n, self.lost)] + ([] if corrected == "–" else [f"p by Holm {corrected}"])
        return f"{names}: {gain} ({', '.join(said)}): {verdict}"

    def _number(self, gain: float) -> str:
        metric = self.a.metric
        return f"{gain * metric.scale:+.{metric.digits}f}".replace("-", "−")

    def _size(self, gain: float) -> str:
        return f"{self._number(gain)} {'points' if self.a.metric.unit == '%' else self.a.metric.unit}"


def judged(comparisons: Sequence[Comparison]) -> list[list[Difference]]:
    """Returns the differences of each comparison of a report, corrected over those of all comparisons that can have a
    verdict. Mixers that were chosen by their scores count as all pairs from which they were chosen."""
    found = [list(differences(comparison)) for comparison in comparisons]
    able = [one for own in found for one in own if one.undecided is None]
    others = sum(unseen(c) for c, own in zip(comparisons, found, strict=True) if own and own[0].kind == "best")
    corrected = iter(stats.holm([*(one.p for one in able), *[1.0] * others]))
    return [[one if one.undecided else replace(one, corrected=next(corrected)) for one in own] for own in found]


def unseen(comparison: Comparison) -> int:
    """The number of pairs that could have a verdict, besides that of the best mixers."""
    return sum(Difference(*pair).undecided is None for pair in combinations(comparison.finished, 2)) - 1


def differences(comparison: Comparison) -> Iterator[Difference]:
    """The differences of a comparison: each mixer with competing heads and its backbone, controls with gates that do
    not compete, backbones with fewer heads; without any of them, the best mixer and the second best."""
    related = [*with_backbones(comparison), *with_controls(comparison), *with_fewer_heads(comparison)]
    found = {(one.a.mixer, one.b.mixer): one for one in related if one.seeds}
    if not found and len(comparison.finished) > 1:
        best = Difference(comparison.finished[0], comparison.finished[1], "best")
        found = {("", ""): best} if best.seeds else {}
    yield from found.values()


def with_backbones(comparison: Comparison) -> Iterator[Difference]:
    """Each mixer with competing heads, and its backbone."""
    for c in competing(comparison):
        if base := find(comparison, zoo.plain(c.spec)):
            yield Difference(c, base)


def with_controls(comparison: Comparison) -> Iterator[Difference]:
    """Each mixer with sigmoid gates, which have the same parameters but do not compete, and its backbone; and the
    softmax gates, and the sigmoid gates."""
    for c, gates in product(competing(comparison), SIGMOIDS):
        base, control = find(comparison, zoo.plain(c.spec)), find(comparison, with_gates(c.spec, **gates))
        if base and control:
            yield from (Difference(control, base, "control"), Difference(c, control, "control"))


def with_fewer_heads(comparison: Comparison) -> Iterator[Difference]:
    """Each backbone of fewer heads, which has a larger state at the same width, and the competing heads."""
    sizes = comparison.plan["shape"]["hidden_size"], comparison.plan["shape"]["heads"]
    for c, plain in product(competing(comparison), comparison.finished):
        fewer = plain.spec.num_heads(*sizes) < c.spec.num_heads(*sizes)
        if fewer and without_count(plain.spec) == without_count(zoo.plain(c.spec)):
            yield Difference(plain, c, "heads")


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
