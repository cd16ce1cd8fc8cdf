"""The statistic that a study's plan names before its runs: paired differences of two mixers over seeds, by scipy, with
Holm's correction over all that the plan asks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ...report.numbers import count
from .question import Question
from .rows import HELD, Row
from .rows import rows as rows_of

LEVEL = 0.05  # of the family: a difference is called one if its corrected p is below

Values = dict[
    str, dict[str, dict[int, float]]
]  # where (a comparison, or "" for the whole sweep) -> mixer -> seed -> value


class Table(NamedTuple):
    answer: str
    about: str
    header: tuple[str, ...]
    rows: list[list[str]]


@dataclass(frozen=True)
class Tested:
    """One paired comparison of the values of a and b. low, high: 95 % interval of the mean difference by Student's t;
    (−∞, ∞) for a single seed. corrected: p by Holm over the family."""

    where: str
    a: str
    b: str
    n: int
    mean: float
    low: float
    high: float
    p: float
    corrected: float = math.nan

    @property
    def verdict(self) -> str:
        if self.corrected >= LEVEL:
            return "not told apart"
        return "more" if self.mean > 0 else "less"


def tested(question: Question, rows: Sequence[Row], swept: dict[str, Any]) -> list[Tested]:
    """Every comparison of the plan, in its order, corrected over all of them.

    swept: name of a comparison -> its value of the swept field; empty without a sweep."""
    found = [
        compared(question.test, where, a, b, by_mixer)
        for a, b in question.pairs
        for where, by_mixer in MEASURES[question.measure](rows, swept).items()
        if a in by_mixer and b in by_mixer
    ]
    return [Tested(**vars(one) | {"corrected": p}) for one, p in zip(found, holm([o.p for o in found]), strict=True)]


def of_results(results: dict[str, Any]) -> list[Table]:
    """The tables of a planned study's results.json; empty for a study without a plan."""
    question = Question.stored(results)
    if question is None:
        return []
    sweep, names = results["study"].get("sweep"), [plan["name"] for plan in results["study"]["plans"]]
    return tables(question, rows_of(results), dict(zip(names, sweep["values"], strict=True)) if sweep else {})


def tables(question: Question, rows: Sequence[Row], swept: dict[str, Any]) -> list[Table]:
    """The statistic of the plan, and the means behind it, as text."""
    found = tested(question, rows, swept)
    return [
        Table(answer(question, found), about(question, found), HEADER, table(question, found)),
        Table("", "", MEANS, table_of_means(question, rows, swept)),
    ]


def compared(test: str, where: str, a: str, b: str, values: dict[str, dict[int, float]]) -> Tested:
    seeds = sorted(values[a].keys() & values[b].keys())
    gains = np.array([values[a][seed] - values[b][seed] for seed in seeds])
    if len(gains) < 2:
        return Tested(
            where, a, b, len(gains), float(gains.mean()) if len(gains) else math.nan, -math.inf, math.inf, 1.0
        )
    if np.ptp(gains) == 0:  # a test of equal differences divides by their spread
        return Tested(where, a, b, len(gains), float(gains[0]), float(gains[0]), float(gains[0]), float(gains[0] == 0))
    student = stats.ttest_1samp(gains, 0)
    p = student.pvalue if test == "t" else stats.wilcoxon(gains).pvalue
    low, high = student.confidence_interval(0.95)
    return Tested(where, a, b, len(gains), float(gains.mean()), float(low), float(high), float(p))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's corrected p: the i-th smallest of m times m − i + 1, never below a smaller one's."""
    order, m = np.argsort(p), len(p)
    raised = np.maximum.accumulate(np.array(p)[order] * (m - np.arange(m))) if m else np.array([])
    found = np.empty(m)
    found[order] = raised.clip(max=1)
    return found.tolist()


# --- as text ---------------------------------------------------------------------------------------------------------
HEADER = ("difference", "at", "seeds", "mean", "95 % interval", "p", "p by Holm", "verdict")
MEANS = ("mixer", "at", "seeds", "mean ± standard deviation", "seeds at an end of the range")


def table(question: Question, found: Sequence[Tested]) -> list[list[str]]:
    names = [f"{question.name(one.a)} - {question.name(one.b)}" for one in found]
    return [
        [name, o.where, str(o.n), f"{o.mean:+.3f}", f"{o.low:+.3f} … {o.high:+.3f}", f"{o.p:.2g}", f"{o.corrected:.2g}",
         o.verdict]
        for name, o in zip(names, found, strict=True)
    ]  # fmt: skip


def table_of_means(question: Question, rows: Sequence[Row], swept: dict[str, Any]) -> list[list[str]]:
    """A row for each mixer and place. The last cell counts values that are bounds: the smallest or largest that the
    measure can have, where the study asked for no more."""
    ends = {"capacity": {math.log2(v) for v in (min(swept.values()), max(swept.values()))} if swept else set(),
            "speed": {float(row["steps"]) for row in rows}}.get(question.measure, set())  # fmt: skip
    cells = []
    for where, by_mixer in MEASURES[question.measure](rows, swept).items():
        for mixer, own in by_mixer.items():
            values = list(own.values())
            power = f" ({2 ** fmean(values):.3g})" if question.measure == "capacity" else ""
            spread = stdev(values) if len(values) > 1 else 0.0
            mean = f"{fmean(values):.3f}{power} ± {spread:.3f}"
            cells.append([question.name(mixer), where, str(len(own)), mean, str(sum(v in ends for v in values))])
    return cells


def about(question: Question, found: Sequence[Tested]) -> str:
    """What the tables show, as a sentence."""
    test = "Student's t" if question.test == "t" else "Wilcoxon's test"
    return (
        f"In {UNITS[question.measure]}. "
        f"Differences are paired by seed; p by {test}, corrected by Holm's rule over {count(len(found), 'comparison')}."
    )


def answer(question: Question, found: Sequence[Tested]) -> str:
    """The primary comparison as a sentence."""
    one = found[0]
    where = f" at {one.where}" if one.where else ""
    return (
        f"{question.text} {question.name(one.a)} less {question.name(one.b)}{where}: {one.mean:+.3f} "
        f"{UNITS[question.measure]} (95 % interval {one.low:+.3f} to {one.high:+.3f}, {count(one.n, 'seed')}, "
        f"p by Holm {one.corrected:.2g}): {one.verdict}."
    )


# --- measures --------------------------------------------------------------------------------------------------------
def scores(rows: Sequence[Row], swept: dict[str, Any]) -> Values:
    return collected(rows, lambda row: row["score"])


def speeds(rows: Sequence[Row], swept: dict[str, Any]) -> Values:
    return collected(rows, lambda row: row["reached"] or row["steps"])


def capacities(rows: Sequence[Row], swept: dict[str, Any]) -> Values:
    """Interpolated linearly in the logarithm; at most the largest value of the field and at least the smallest."""
    curves: dict[str, dict[int, dict[float, float]]] = {}
    for row in rows:
        if not row["trial"]:
            curve = curves.setdefault(row["mixer"], {}).setdefault(row["seed"], {})
            curve[math.log2(swept[row["comparison"]])] = row["score"] or 0.0
    return {"": {mixer: {seed: held(curve) for seed, curve in own.items()} for mixer, own in curves.items()}}


def held(curve: dict[float, float]) -> float:
    """The place up to which a curve {place: score} is at least HELD."""
    places = sorted(curve)
    lost = next((i for i, x in enumerate(places) if curve[x] < HELD), None)
    if lost is None:
        return places[-1]
    if lost == 0:
        return places[0]
    x, y = places[lost - 1], places[lost]
    return x + (y - x) * (curve[x] - HELD) / (curve[x] - curve[y])


def collected(rows: Sequence[Row], measure: Any) -> Values:
    found: Values = {}
    for row in rows:
        if not row["trial"] and row["score"] is not None:
            found.setdefault(row["comparison"], {}).setdefault(row["mixer"], {})[row["seed"]] = float(measure(row))
    return found


MEASURES = {"score": scores, "speed": speeds, "capacity": capacities}
UNITS = {
    "score": "units of the final score",
    "speed": f"steps to a score of {HELD:g}, all steps where it is not reached",
    "capacity": f"doublings of the swept field, up to the value at which the score falls below {HELD:g}",
}
