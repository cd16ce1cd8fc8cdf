"""The statistic that a study's plan names before its runs: paired differences of two mixers over seeds, by scipy, with
Holm's correction over all comparisons of a family."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ...report.numbers import count
from .question import Question
from .rows import HELD, Row
from .rows import rows as rows_of

LEVEL = 0.05  # of the family: a difference is called one if its corrected p is below

Values = dict[str, dict[str, dict[int, float]]]  # a place, such as a comparison -> mixer -> seed -> value


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


def differences(asked: Sequence[tuple[Question, Sequence[Row]]]) -> list[list[Tested]]:
    """Every comparison of each study (its question and its runs) in the plan's order, corrected over those of all."""
    found = [
        [
            compared(question.test, where, a, b, by_mixer)
            for a, b in question.pairs
            for where, by_mixer in collected(rows, question.measure).items()
            if a in by_mixer and b in by_mixer
        ]
        for question, rows in asked
    ]
    corrected = iter(holm([one.p for own in found for one in own]))
    return [[replace(one, corrected=next(corrected)) for one in own] for own in found]


def of_results(results: dict[str, Any]) -> list[Table]:
    """The tables of a planned study's results.json; empty for a study without a plan."""
    question = Question.stored(results)
    if question is None:
        return []
    rows = rows_of(results)
    (found,) = differences([(question, rows)])
    return tables(question, rows, found)


def tables(question: Question, rows: Sequence[Row], found: Sequence[Tested]) -> list[Table]:
    """The statistic of the plan, which `differences` found, and the means behind it, as text."""
    shown = (
        (answer(question, found), about(question), table(question, found)),
        ("", "", table_of_means(question, rows)),
    )
    return [Table(said, note, tuple(cells[0]), cells[1:]) for said, note, cells in shown]


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
DIGITS = {"score": 3, "losses": 3, "speed": 0, "capacity": 2}
MEANS = {
    "score": "mean ± standard deviation",
    "losses": "mean ± standard deviation",
    "speed": "mean ± standard deviation",
    "capacity": "length held: geometric mean (within one standard deviation)",
}


def table(question: Question, found: Sequence[Tested]) -> list[list[str]]:
    """A header, and a row for each comparison."""
    digits = DIGITS[question.measure]
    rows = [["difference", "at", "seeds", "mean", "95 % interval", "p", "p by Holm", "verdict"]]
    for o in found:
        interval = f"{o.low:+.{digits}f} … {o.high:+.{digits}f}"
        name = f"{question.name(o.a)} - {question.name(o.b)}"
        mean, p = f"{o.mean:+.{digits}f}", f"{o.p:.2g}"
        rows.append([name, o.where, str(o.n), mean, interval, p, f"{o.corrected:.2g}", o.verdict])
    return placed(rows)


def table_of_means(question: Question, rows: Sequence[Row]) -> list[list[str]]:
    """A header, and a row for each mixer and place. The last cell counts the values that are bounds."""
    ends = set[float]().union(*(bounds(question.measure, row) for row in rows))
    cells = [["mixer", "at", "seeds", MEANS[question.measure], "seeds at an end of the range"]]
    for where, by_mixer in collected(rows, question.measure).items():
        for mixer, own in by_mixer.items():
            values = list(own.values())
            said = mean_and_spread(question.measure, values)
            cells.append([question.name(mixer), where, str(len(own)), said, str(sum(v in ends for v in values))])
    return placed(cells)


def mean_and_spread(measure: str, values: Sequence[float]) -> str:
    mean, spread, digits = fmean(values), stdev(values) if len(values) > 1 else 0.0, DIGITS[measure]
    if measure == "capacity":
        return f"{2**mean:.0f} ({2 ** (mean - spread):.0f} to {2 ** (mean + spread):.0f})"
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def placed(rows: list[list[str]]) -> list[list[str]]:
    """The table without the place, its second column, if that is the same everywhere."""
    return rows if len({row[1] for row in rows[1:]}) > 1 else [[row[0], *row[2:]] for row in rows]


def about(question: Question) -> str:
    """What the tables show, as a sentence."""
    test = "Student's t" if question.test == "t" else "Wilcoxon's test"
    return f"In {UNITS[question.measure]}. Differences are paired by seed; p by {test}, corrected by Holm's rule."


def answer(question: Question, found: Sequence[Tested]) -> str:
    """The primary comparison as a sentence."""
    one = found[0]
    digits = DIGITS[question.measure]
    where = f" at {one.where}" if len({other.where for other in found}) > 1 else ""
    return (
        f"{question.text} {question.name(one.a)} less {question.name(one.b)}{where}: {one.mean:+.{digits}f} "
        f"{UNITS[question.measure]} (95 % interval {one.low:+.{digits}f} to {one.high:+.{digits}f}, "
        f"{count(one.n, 'seed')}, "
        f"p by Holm {one.corrected:.2g}): {one.verdict}."
    )


# --- measures --------------------------------------------------------------------------------------------------------
def score(row: Row) -> dict[str, float]:
    return {row["comparison"]: row["score"]}


def losses(row: Row) -> dict[str, float]:
    """The losses of a language model: over all tokens, over those that a score names, and in rows of each length."""
    named = {name: loss for name, loss in row["scores"].items() if name.startswith("loss ")}
    by_length = {f"rows of {n:,}": loss for n, loss in sorted(row["by_length"].items())}
    found = {"all tokens": row["loss"]} | named | by_length
    return {f"{row['comparison']}, {name}": loss for name, loss in found.items()}


def speed(row: Row) -> dict[str, float]:
    return {row["comparison"]: float(row["reached"] or row["steps"])}


def capacity(row: Row) -> dict[str, float]:
    return {row["comparison"]: length_held(row)}


def length_held(row: Row) -> float:
    """log2 of the length up to which the score is at least HELD, interpolated linearly in it; at least the smallest
    length that was tested, and at most the largest."""
    lengths, curve = sorted(row["by_length"]), row["by_length"]
    lost = next((i for i, n in enumerate(lengths) if curve[n] < HELD), len(lengths))
    if lost in (0, len(lengths)):
        return math.log2(lengths[max(lost - 1, 0)])
    low, high = lengths[lost - 1 : lost + 1]
    return math.log2(low) + math.log2(high / low) * (curve[low] - HELD) / (curve[low] - curve[high])


def bounds(measure: str, row: Row) -> set[float]:
    """The values that say only that the true one lies beyond."""
    if measure == "capacity":
        return {math.log2(min(row["by_length"])), math.log2(max(row["by_length"]))}
    return {float(row["steps"])} if measure == "speed" else set()


def collected(rows: Sequence[Row], measure: str) -> Values:
    found: Values = {}
    for row in rows:
        if not row["trial"] and row["score"] is not None:
            for place, value in MEASURES[measure](row).items():
                found.setdefault(place, {}).setdefault(row["mixer"], {})[row["seed"]] = value
    return found


MEASURES = {"score": score, "losses": losses, "speed": speed, "capacity": capacity}
UNITS = {
    "score": "units of the final score",
    "losses": "nats per token",
    "speed": f"steps to a score of {HELD:g}, all steps where it is not reached",
    "capacity": f"doublings of the length held, the longest row with a score of at least {HELD:g}",
}
