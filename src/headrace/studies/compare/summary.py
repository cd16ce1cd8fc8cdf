"""Results as the report sees them: a comparison is a list of contenders, a contender one mixer with all its seeds."""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ... import zoo
from ...spec.linear import Spec, from_json
from ...tasks import TASKS, Metric

MANY = 12  # more mixers than this are shown backbone by backbone


@dataclass(frozen=True)
class Contender:
    mixer: str
    label: str
    spec: Spec
    arms: Sequence[dict[str, Any]]  # the finished ones, by seed
    metric: Metric

    @property
    def by_seed(self) -> dict[int, float]:
        """Final scores; a seed that diverged has none."""
        return {arm["seed"]: arm["scores"][self.metric.name] for arm in self.arms if not arm["diverged"]}

    @property
    def gated(self) -> bool:
        return self.spec != zoo.plain(self.spec)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for a single one."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else 0.0

    @property
    def speeds(self) -> list[float]:
        """Tokens per second in training, of every stretch between evaluations of every seed."""
        return [speed for arm in self.arms for speed in arm["speeds"]]

    @property
    def speed(self) -> str:
        """The median of them, and half the distance of their quartiles."""
        low, middle, high = quartiles(self.speeds)
        return f"{middle:,.0f}" + (f" ± {(high - low) / 2:,.0f}" if len(self.speeds) > 1 else "")

    def constant(self, name: str) -> Any:
        """A field that no seed changes: parameters, gate_parameters, state_bytes, flops, intermediate_size."""
        return self.arms[0][name]

    @property
    def gates(self) -> list[dict[str, Any]]:
        """Gate statistics at the end of the first seed."""
        return self.arms[0]["curve"][-1]["gates"]

    @property
    def alignment(self) -> dict[str, Any] | None:
        """What one target of the first seed was aligned to: {source, target, weights}."""
        return self.arms[0].get("alignment")

    def entropy(self, gate: str) -> list[tuple[int, float]]:
        """(step, entropy of the gates as a part of its maximum, mean over layers and seeds)."""
        points: dict[int, list[float]] = {}
        for arm in self.arms:
            for point in arm["curve"]:
                points.setdefault(point["step"], []).extend(g["entropy"] for g in point["gates"] if g["gate"] == gate)
        return [(step, statistics.fmean(values)) for step, values in sorted(points.items()) if values]

    @property
    def by_length(self) -> dict[int, list[float]]:
        """The score of every seed by the length of the row or source; empty where the task has no such thing."""
        arms = [arm["by_length"] for arm in self.arms if arm.get("by_length")]
        return {int(n): [arm[n] for arm in arms] for n in arms[0]} if arms else {}

    def curve(self) -> list[tuple[int, float, float, float]]:
        """(step, mean, smallest, largest score over seeds)."""
        points: dict[int, list[float]] = {}
        for arm in self.arms:
            for point in arm["curve"]:
                if point["scores"]:
                    points.setdefault(point["step"], []).append(point["scores"][self.metric.name])
        return [(step, statistics.fmean(v), min(v), max(v)) for step, v in sorted(points.items())]


@dataclass(frozen=True)
class Comparison:
    plan: dict[str, Any]
    metric: Metric
    contenders: list[Contender]
    numbers: dict[str, int]  # of a mixer, in the whole study: a mixer has one colour everywhere

    @property
    def finished(self) -> list[Contender]:
        """Contenders with a score, the best first."""
        return sorted(self.finished_in_order, key=lambda c: c.mean, reverse=self.metric.higher_is_better)

    @property
    def finished_in_order(self) -> list[Contender]:
        """Contenders with a score, as they were named."""
        return [c for c in self.contenders if c.by_seed]

    @property
    def gated(self) -> list[Contender]:
        return [c for c in self.finished_in_order if c.gated]

    @property
    def many(self) -> bool:
        return len(self.contenders) > MANY

    @property
    def shown(self) -> list[Contender]:
        """In the order of tables: many mixers by their scores."""
        lost = [c for c in self.contenders if not c.by_seed]
        return [*self.finished, *lost] if self.many else self.contenders

    def families(self) -> list[tuple[str, list[Contender]]]:
        """Contenders by their backbone, under the name of the first; the backbone with the best of them first."""
        found: dict[Spec, list[Contender]] = {}
        for contender in self.shown:
            found.setdefault(zoo.plain(contender.spec), []).append(contender)
        plain = [sorted(members, key=lambda c: c.gated) for members in found.values()]
        return [(members[0].label, members) for members in plain]


def summarise(results: dict[str, Any]) -> list[Comparison]:
    """Comparisons from results.json; mixers without a finished arm are left out."""
    plans = results["study"]["plans"]
    mixers = dict.fromkeys(mixer for plan in plans for mixer in plan["mixers"])
    return [comparison(plan, results["arms"], {m: i for i, m in enumerate(mixers)}) for plan in plans]


def comparison(plan: dict[str, Any], arms: list[dict[str, Any]], numbers: dict[str, int]) -> Comparison:
    metric, names = TASKS[plan["task"]["name"]].metric, labels(plan["mixers"])
    contenders = []
    for mixer in plan["mixers"]:
        own = [arm for arm in arms if (arm["comparison"], arm["mixer"]) == (plan["name"], mixer)]
        if own:
            own.sort(key=lambda arm: arm["seed"])
            contenders.append(Contender(mixer, names[mixer], from_json(plan["specs"][mixer]), own, metric))
    return Comparison(plan, metric, contenders, numbers)


def task_of(plan: dict[str, Any]) -> Any:
    """The task that a plan writes."""
    cls = TASKS[plan["name"]]
    values = {f.name: plan[f.name] for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


# --- names and numbers -----------------------------------------------------------------------------------------------
def labels(mixers: Sequence[str]) -> dict[str, str]:
    """Short names: settings that all mixers share are left out."""
    parsed = {mixer: parse(mixer) for mixer in mixers}
    shared = set.intersection(*(set(settings) for _, settings in parsed.values())) if len(parsed) > 1 else set()
    return {mixer: label(name, [s for s in settings if s not in shared]) for mixer, (name, settings) in parsed.items()}


def parse(mixer: str) -> tuple[str, list[str]]:
    name, _, settings = mixer.replace(" ", "").rstrip(")").partition("(")
    return name, [setting for setting in settings.split(",") if setting]


def label(name: str, settings: list[str]) -> str:
    """`softmax-x(competition.activation=sigmoid)` has nothing of a softmax left: it is called sigmoid-x."""
    if name.startswith("softmax-") and "competition.activation=sigmoid" in settings:
        name = "sigmoid-" + name.removeprefix("softmax-")
        settings = [s for s in settings if s != "competition.activation=sigmoid"]
    short = [s.replace("heads.count=", "heads=").removeprefix("competition.") for s in settings]
    return f"{name} ({', '.join(short)})" if short else name


def show(metric: Metric, score: float, spread: float | None = None) -> str:
    """ "99.2 ± 1.4 %"."""
    around = "" if spread is None else f" ± {spread * metric.scale:.{metric.digits}f}"
    return f"{score * metric.scale:.{metric.digits}f}{around} {metric.unit}"


def show_scores(metric: Metric, scores: Collection[float]) -> str:
    """The mean and, of several seeds, the standard deviation."""
    return show(metric, statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else None)


def show_contender(contender: Contender) -> str:
    return show_scores(contender.metric, contender.by_seed.values())


def quartiles(numbers: Sequence[float]) -> list[float]:
    return statistics.quantiles(numbers, n=4) if len(numbers) > 1 else [*numbers] * 3


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("s" if n != 1 else "")
