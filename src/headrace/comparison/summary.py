"""Results in the form that reports use: a comparison has contenders, a contender is one mixer with all its seeds."""

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .. import zoo
from ..report.numbers import quartiles, seeds_of
from ..spec.serialize import Spec, from_json
from ..tasks import TASKS, Metric

FLOAT = 4  # bytes of a number in a state of float32, in which arms train
MANY = 12  # with more mixers than this, pictures have a panel for each backbone


@dataclass(frozen=True)
class Contender:
    """One mixer of a comparison with the results of its seeds."""

    mixer: str
    label: str
    spec: Spec
    arms: Sequence[dict[str, Any]]  # finished arms, by seed
    metric: Metric

    @property
    def by_seed(self) -> dict[int, float]:
        """Seed -> final score; seeds that diverged are left out."""
        return {arm["seed"]: arm["scores"][self.metric.name] for arm in self.arms if not arm["diverged"]}

    @property
    def lost(self) -> list[int]:
        """Seeds that diverged."""
        return [arm["seed"] for arm in self.arms if arm["diverged"]]

    @property
    def named(self) -> str:
        """The label, with the number of seeds that a mean is over if some diverged, as in "gla (2 of 3 seeds)"."""
        return self.label + self.survivors

    @property
    def survivors(self) -> str:
        return f" ({seeds_of(len(self.by_seed), len(self.lost))})" if self.lost else ""

    @property
    def gated(self) -> bool:
        """Whether the mixer has competition gates (softmax or sigmoid)."""
        return self.spec != zoo.plain(self.spec)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for a single one."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else 0.0

    @property
    def speed(self) -> str:
        """Training tokens per second, as text: the median over the intervals between evaluations of all seeds ± half
        their interquartile range."""
        speeds = [speed for arm in self.arms for speed in arm["speeds"]]
        low, middle, high = quartiles(speeds)
        compiled = ", compiled" if any(arm.get("compiled") for arm in self.arms) else ""
        return f"{middle:,.0f}" + (f" ± {(high - low) / 2:,.0f}" if len(speeds) > 1 else "") + compiled

    def constant(self, name: str) -> Any:
        """A field that is the same for all seeds: parameters, gate_parameters, state_bytes, flops or
        intermediate_size."""
        return self.arms[0][name]

    @property
    def state(self) -> int:
        """Numbers in the state of one row after its last token, over all layers."""
        return self.constant("state_bytes") // FLOAT

    @property
    def gates(self) -> list[dict[str, Any]]:
        """Gate statistics at the end of the first seed."""
        return self.arms[0]["curve"][-1]["gates"]

    @property
    def alignment(self) -> dict[str, Any] | None:
        """Alignment of one held-out row in the first seed: {source, target, weights [target, source]}; None without."""
        return self.arms[0].get("alignment")

    def entropy(self, gate: str) -> list[tuple[int, float]]:
        """(step, gate entropy / log(heads)), the mean over layers and seeds."""
        points = self._by_step(lambda point: [g["entropy"] for g in point["gates"] if g["gate"] == gate])
        return [(step, statistics.fmean(values)) for step, values in points]

    def curve(self) -> list[tuple[int, float, float, float]]:
        """(step, mean, smallest, largest score over seeds)."""
        points = self._by_step(lambda point: [point["scores"][self.metric.name]] if point["scores"] else [])
        return [(step, statistics.fmean(scores), min(scores), max(scores)) for step, scores in points]

    def _by_step(self, of: Callable[[dict[str, Any]], list[float]]) -> list[tuple[int, list[float]]]:
        points: dict[int, list[float]] = {}
        for point in (point for arm in self.arms for point in arm["curve"]):
            points.setdefault(point["step"], []).extend(of(point))
        return [(step, values) for step, values in sorted(points.items()) if values]

    @property
    def by_length(self) -> dict[int, list[float]]:
        """Length of row or source -> score of each seed; empty if the task has no held-out rows of other lengths."""
        arms = [arm["by_length"] for arm in self.arms if arm.get("by_length")]
        return {int(n): [arm[n] for arm in arms] for n in arms[0]} if arms else {}


@dataclass(frozen=True)
class Comparison:
    """The results of one plan."""

    plan: dict[str, Any]
    metric: Metric
    contenders: list[Contender]
    numbers: dict[str, int]  # mixer -> index in the whole study, so that a mixer has one colour in all its pictures

    @property
    def finished(self) -> list[Contender]:
        """Contenders with a score: those that diverged in the fewest seeds and, of these, the best mean first."""
        sign = -1 if self.metric.higher_is_better else 1
        return sorted(self.finished_in_order, key=lambda c: (len(c.lost), sign * c.mean))

    @property
    def finished_in_order(self) -> list[Contender]:
        """Contenders with a score, in the order of the plan."""
        return [c for c in self.contenders if c.by_seed]

    @property
    def gated(self) -> list[Contender]:
        return [c for c in self.finished_in_order if c.gated]

    @property
    def many(self) -> bool:
        return len(self.contenders) > MANY

    @property
    def shown(self) -> list[Contender]:
        """Contenders in the order of tables: by score if there are many, else in the order of the plan."""
        lost = [c for c in self.contenders if not c.by_seed]
        return [*self.finished, *lost] if self.many else self.contenders

    def families(self) -> list[tuple[str, list[Contender]]]:
        """(label, contenders) of each backbone, in the order of `shown`; the label is that of the ungated contender, if
        there is one."""
        by_backbone: dict[Spec, list[Contender]] = {}
        for contender in self.shown:
            by_backbone.setdefault(zoo.plain(contender.spec), []).append(contender)
        plain = [sorted(members, key=lambda c: c.gated) for members in by_backbone.values()]
        return [(members[0].label, members) for members in plain]


@dataclass(frozen=True)
class Sweep:
    """A comparison that is repeated at several values of a field."""

    field: str
    values: list[Any]
    comparisons: list[Comparison]  # one for each value

    @classmethod
    def of(cls, results: dict[str, Any]) -> "Sweep | None":
        """The sweep of a results.json, if its study is one."""
        about = results["study"].get("sweep")
        return cls(about["field"], about["values"], summarize(results)) if about else None

    @property
    def mixers(self) -> dict[str, dict[Any, Contender]]:
        """Label -> value -> the mixer at this value."""
        by_label: dict[str, dict[Any, Contender]] = {}
        for value, comparison in zip(self.values, self.comparisons, strict=True):
            for contender in comparison.contenders:
                by_label.setdefault(contender.label, {})[value] = contender
        return by_label


def summarize(results: dict[str, Any]) -> list[Comparison]:
    """The comparisons of a results.json; mixers without a finished arm are left out."""
    plans = results["study"]["plans"]
    mixers = dict.fromkeys(mixer for plan in plans for mixer in plan["mixers"])
    return [comparison(plan, results["arms"], {m: i for i, m in enumerate(mixers)}) for plan in plans]


def comparison(plan: dict[str, Any], arms: list[dict[str, Any]], numbers: dict[str, int]) -> Comparison:
    metric, contenders = TASKS[plan["task"]["name"]].metric, []
    for mixer, name in labels(plan["mixers"]).items():
        own = [arm for arm in arms if (arm["comparison"], arm["mixer"]) == (plan["name"], mixer)]
        by_seed = sorted(own, key=lambda arm: arm["seed"])
        contenders += [Contender(mixer, name, from_json(plan["specs"][mixer]), by_seed, metric)] if own else []
    return Comparison(plan, metric, contenders, numbers)


def task_of(plan: dict[str, Any]) -> Any:
    """The task from its JSON in a plan."""
    cls = TASKS[plan["name"]]
    values = {f.name: plan[f.name] for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


# --- names and numbers -----------------------------------------------------------------------------------------------
def labels(mixers: Sequence[str]) -> dict[str, str]:
    """Mixer -> its label: an expression, as `compare --mixers` takes it, without the settings that all mixers share."""
    shared = shared_settings(mixers)
    return {mixer: label(name, [s for s in own if s not in shared]) for mixer, (name, own) in parsed(mixers).items()}


def shared_settings(mixers: Sequence[str]) -> list[str]:
    """The settings that all of several mixers have, in the order of the first."""
    listed = [own for _, own in parsed(mixers).values()]
    return [setting for setting in listed[0] if all(setting in own for own in listed)] if len(listed) > 1 else []


def parsed(mixers: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Mixer -> its name and settings. A sequence of several mixers, such as "gla+transformer", is a name."""
    cut = {m: m.replace(" ", "").removesuffix(")").partition("(") for m in mixers if len(zoo.split(m, "+")) == 1}
    return {m: (cut[m][0], list(zoo.split(cut[m][2]))) if m in cut else (m.replace(" ", ""), []) for m in mixers}


def label(name: str, settings: list[str]) -> str:
    return f"{name}({', '.join(settings)})" if settings else name


def show(metric: Metric, score: float, spread: float | None = None) -> str:
    """A score with its unit, such as "99.2 ± 1.4 %"."""
    around = "" if spread is None else f" ± {spread * metric.scale:.{metric.digits}f}"
    return f"{score * metric.scale:.{metric.digits}f}{around} {metric.unit}"


def show_scores(metric: Metric, scores: Collection[float]) -> str:
    """The mean of the finite scores and, for several, the standard deviation; how many they are, if others are not."""
    known = [score for score in scores if math.isfinite(score)]
    if not known:
        return "not finite"
    few = f" ({seeds_of(len(known), lost)})" if (lost := len(scores) - len(known)) else ""
    return show(metric, statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None) + few


def show_contender(contender: Contender) -> str:
    """The mean score and standard deviation, and over how many seeds if some diverged."""
    if not contender.by_seed:
        return "diverged"
    return show_scores(contender.metric, contender.by_seed.values()) + contender.survivors
