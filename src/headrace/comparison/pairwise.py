"""The differences between the mixers of a report, paired by seed: which are judged, as one family."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from statistics import fmean
from typing import Any

from .. import zoo
from ..report import differences as report
from ..report.differences import Difference, Unit
from ..spec.attention import AttentionSpec
from ..spec.linear import MixerSpec
from ..spec.serialize import Spec
from ..tasks import Metric
from .summary import Comparison, Contender

EASY = "both solve the task"
# Gates of controls: of the range of the softmax, and of the earlier default, which results of older versions have.
SIGMOIDS: tuple[dict[str, Any], ...] = ({"activation": "sigmoid"}, {"activation": "sigmoid", "range": 2.0})


def between(a: Contender, b: Contender, kind: str = "backbone", where: str = "") -> Difference:
    """The gain of mixer a over mixer b, above 0 if a is better, over the seeds in which neither diverged. Both train on
    the same rows for a seed, so scores are paired by seed.

    kind: "backbone", "control", "heads", or "best" of those that do not belong together."""
    metric, seeds = a.metric, [seed for seed in a.by_seed if seed in b.by_seed]
    sign = 1 if metric.higher_is_better else -1
    gains = [sign * (a.by_seed[seed] - b.by_seed[seed]) for seed in seeds]
    common = [[c.by_seed[seed] for seed in seeds] for c in (a, b)]
    solved = bool(seeds) and metric.solved is not None and min(map(fmean, common)) >= metric.solved
    easy = {"undecided": EASY} if solved else {}
    lost = len({*a.lost, *b.lost})
    return report.over_seeds(a.label, b.label, gains, unit(metric), where=where, kind=kind, lost=lost, **easy)


def unit(metric: Metric) -> Unit:
    name = "points" if metric.unit == "%" else metric.unit
    return Unit(name, name, metric.digits, metric.scale)


def judged(comparisons: Sequence[Comparison]) -> list[list[Difference]]:
    """Returns the differences of each comparison of a report, corrected over those of all comparisons that can have a
    verdict. Mixers that were chosen by their scores count as all pairs from which they were chosen."""
    found = [list(differences(comparison)) for comparison in comparisons]
    others = sum(unseen(c) for c, own in zip(comparisons, found, strict=True) if own and own[0].kind == "best")
    return report.judged(found, others)


def unseen(comparison: Comparison) -> int:
    """The number of pairs that could have a verdict, besides that of the best mixers."""
    return sum(between(*pair).undecided is None for pair in combinations(comparison.finished, 2)) - 1


def differences(comparison: Comparison) -> Iterator[Difference]:
    """The differences of a comparison: each mixer with competing heads and its backbone, controls with gates that do
    not compete, backbones with fewer heads; without any of them, the best mixer and the second best."""
    where, ranked = comparison.plan["name"], comparison.finished
    related = [*with_backbones(comparison), *with_controls(comparison), *with_fewer_heads(comparison)]
    pairs = {(a.mixer, b.mixer): between(a, b, kind, where) for a, b, kind in related}
    found = [one for one in pairs.values() if one.mean.n]
    best = [between(ranked[0], ranked[1], "best", where)] if len(ranked) > 1 and not found else []
    whole = sum(not c.lost for c in ranked)
    among = f"{whole} that never diverged" if 0 < whole < len(ranked) else len(ranked)
    best = [replace(one, a=f"{one.a} (best of {among})") for one in best]
    yield from found or [one for one in best if one.mean.n]


Pairs = Iterator[tuple[Contender, Contender, str]]  # and why the two are compared


def with_backbones(comparison: Comparison) -> Pairs:
    """Each mixer with competing heads, and its backbone."""
    for c in competing(comparison):
        if base := find(comparison, zoo.plain(c.spec)):
            yield c, base, "backbone"


def with_controls(comparison: Comparison) -> Pairs:
    """Each mixer with sigmoid gates, which have the same parameters but do not compete, and its backbone; and the
    softmax gates, and the sigmoid gates."""
    for c, gates in product(competing(comparison), SIGMOIDS):
        base, control = find(comparison, zoo.plain(c.spec)), find(comparison, with_gates(c.spec, **gates))
        if base and control:
            yield from ((control, base, "control"), (c, control, "control"))


def with_fewer_heads(comparison: Comparison) -> Pairs:
    """Each backbone of fewer heads, which has a larger state at the same width, and the competing heads."""
    sizes = comparison.plan["shape"]["hidden_size"], comparison.plan["shape"]["heads"]
    for c, plain in product(competing(comparison), comparison.finished):
        fewer = plain.spec.num_heads(*sizes) < c.spec.num_heads(*sizes)
        if fewer and without_count(plain.spec) == without_count(zoo.plain(c.spec)):
            yield plain, c, "heads"


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
