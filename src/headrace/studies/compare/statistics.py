"""The statistic that a study's plan names before its runs: paired differences of two mixers over seeds, by scipy, with
Holm's correction over all comparisons of a family."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ..report.numbers import ROUNDING, SEEDS, equal, half_interval, out_of, seeds_of
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
    """One paired comparison of the values of a and b over n seeds, in which both have one. low, high: 95 % interval of
    the mean difference by Student's t; (−∞, ∞) if the seeds are too few, or equal. lost: seeds in which a or b
    diverged. corrected: p by Holm over the family."""

    where: str
    a: str
    b: str
    n: int
    mean: float
    low: float
    high: float
    p: float
    lost: int = 0
    corrected: float = math.nan

    @property
    def verdict(self) -> str:
        if self.n < SEEDS:
            return "too few seeds"
        if self.corrected >= LEVEL:
            return "not told apart"
        return "more" if self.mean > 0 else "less"

    def interval(self, digits: int, to: str = " to ") -> str:
        """The interval as text."""
        if math.isinf(self.low):
            return "no interval"
        return f"{self.low:+.{digits}f}{to}{self.high:+.{digits}f}"


def differences(asked: Sequence[tuple[Question, Sequence[Row]]]) -> list[list[Tested]]:
    """Every comparison of each study (its question and its runs) in the plan's order, corrected over those of all."""
    found = [
        [
            replace(compared(question.test, where, a, b, by_mixer), lost=len(lost(rows, question.measure, where, a, b)))
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
    return tested(test, where, a, b, [values[a][seed] - values[b][seed] for seed in seeds])


def tested(test: str, where: str, a: str, b: str, gains: Sequence[float]) -> Tested:
    """The comparison whose difference in each seed is given."""
    mean, half = fmean(gains) if gains else math.nan, half_interval(gains)
    low, high = (-half, half) if math.isinf(half) else (mean - half, mean + half)
    return Tested(where, a, b, len(gains), mean, low, high, p_of(test, gains))


def p_of(test: str, gains: Sequence[float]) -> float:
    """p of a mean of 0. Equal differences have no spread for Student's t; then, too, it is that of Wilcoxon's test,
    which is exact: 2^(1 − n)."""
    if len(gains) < 2 or max(map(abs, gains)) <= ROUNDING:
        return 1.0
    by_t = test == "t" and not equal(gains)
    return float((stats.ttest_1samp(gains, 0) if by_t else stats.wilcoxon(gains)).pvalue)


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
        name = f"{question.name(o.a)} - {question.name(o.b)}"
        mean, p = f"{o.mean:+.{digits}f}" if o.n else "–", f"{o.p:.2g}"
        seeds, interval = out_of(o.n, o.lost), o.interval(digits, " … ")
        rows.append([name, o.where, seeds, mean, interval, p, f"{o.corrected:.2g}", o.verdict])
    return placed(rows)


def table_of_means(question: Question, rows: Sequence[Row]) -> list[list[str]]:
    """A header, and a row for each mixer and place. The last cell counts the values that are bounds."""
    ends = set[float]().union(*(bounds(question.measure, row) for row in rows))
    cells = [["mixer", "at", "seeds", MEANS[question.measure], "seeds at an end of the range"]]
    for where, by_mixer in collected(rows, question.measure).items():
        for mixer, own in by_mixer.items():
            values, gone = list(own.values()), len(lost(rows, question.measure, where, mixer))
            said = mean_and_spread(question.measure, values) if values else "diverged"
            at_ends = str(sum(value in ends for value in values))
            cells.append([question.name(mixer), where, out_of(len(own), gone), said, at_ends])
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
    if not found or not found[0].n:
        a, b = map(question.name, question.pairs[0])
        return f"{question.text} {a} and {b} have no seed in which neither diverged."
    one = found[0]
    digits = DIGITS[question.measure]
    where = f" at {one.where}" if len({other.where for other in found}) > 1 else ""
    interval = "no interval" if math.isinf(one.low) else f"95 % interval {one.interval(digits)}"
    return (
        f"{question.text} {question.name(one.a)} less {question.name(one.b)}{where}: {one.mean:+.{digits}f} "
        f"{UNITS[question.measure]} ({interval}, {seeds_of(one.n, one.lost)}, p by Holm {one.corrected:.2g}): "
        f"{one.verdict}."
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
    length that was tested, and at most the largest. A score that is not finite is below HELD."""
    lengths, curve = sorted(row["by_length"]), row["by_length"]
    lost = next((i for i, n in enumerate(lengths) if not curve[n] >= HELD), len(lengths))
    if lost in (0, len(lengths)):
        return math.log2(lengths[max(lost - 1, 0)])
    low, high = lengths[lost - 1 : lost + 1]
    if not math.isfinite(curve[high]):
        return math.log2(low)
    return math.log2(low) + math.log2(high / low) * (curve[low] - HELD) / (curve[low] - curve[high])


def bounds(measure: str, row: Row) -> set[float]:
    """The values that say only that the true one lies beyond."""
    if measure == "capacity":
        return {math.log2(min(row["by_length"])), math.log2(max(row["by_length"]))}
    return {float(row["steps"])} if measure == "speed" else set()


def collected(rows: Sequence[Row], measure: str) -> Values:
    """The values of the reported runs that are finite; none, at each place of its comparison, of a mixer that always
    diverged."""
    found: Values = {}
    reported = [row for row in rows if not row["trial"]]
    for row in (row for row in reported if row["score"] is not None):
        for place, value in MEASURES[measure](row).items():
            own = found.setdefault(place, {}).setdefault(row["mixer"], {})
            own |= {row["seed"]: value} if math.isfinite(value) else {}
    for row in (row for row in reported if row["score"] is None):
        for place in (place for place in found if comparison_of(place) == row["comparison"]):
            found[place].setdefault(row["mixer"], {})
    return found


def lost(rows: Sequence[Row], measure: str, place: str, *mixers: str) -> set[int]:
    """The seeds in which a reported run of the mixers diverged, or has a value that is not finite at the place."""
    reported = (row for row in rows if not row["trial"] and row["comparison"] == comparison_of(place))
    own = (row for row in reported if row["mixer"] in mixers)
    return {
        row["seed"]
        for row in own
        if row["score"] is None or not math.isfinite(MEASURES[measure](row).get(place, math.nan))
    }


def comparison_of(place: str) -> str:
    return place.partition(", ")[0]


MEASURES = {"score": score, "losses": losses, "speed": speed, "capacity": capacity}
UNITS = {
    "score": "units of the final score",
    "losses": "nats per token",
    "speed": f"steps to a score of {HELD:g}, all steps where it is not reached",
    "capacity": f"doublings of the length held, the longest row with a score of at least {HELD:g}",
}
