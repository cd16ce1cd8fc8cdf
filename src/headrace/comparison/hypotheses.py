"""The hypotheses of a planned study: what it measures of a run, and the differences of two mixers, paired by seed. The
family that Holm's rule corrects is every difference of all studies that are given to `differences`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd

from ..report import stats
from ..report.numbers import out_of, seeds_of
from ..report.stats import SEEDS, Mean
from .question import Question
from .rows import HELD, Row
from .rows import rows as rows_of

LEVEL = 0.05  # of the family: a difference is called one if its corrected p is below


class Table(NamedTuple):
    answer: str
    about: str
    header: tuple[str, ...]
    rows: list[list[str]]


@dataclass(frozen=True)
class Hypothesis:
    """The difference of the values of a and b at a place, such as a comparison, over the seeds in which both have one.
    lost: seeds in which a or b diverged. corrected: p by Holm over the family."""

    where: str
    a: str
    b: str
    gain: Mean
    p: float
    lost: int = 0
    corrected: float = math.nan

    @property
    def verdict(self) -> str:
        if self.gain.n < SEEDS:
            return "too few seeds"
        if self.corrected >= LEVEL:
            return "not told apart"
        return "more" if self.gain.value > 0 else "less"


def differences(studies: Sequence[tuple[Question, Sequence[Row]]]) -> list[list[Hypothesis]]:
    """Every difference of each study (its question and its runs) in the plan's order, corrected over those of all."""
    tests = [
        [
            compared(question.test, str(place), a, b, own)
            for a, b in question.pairs
            for place, own in values(rows, question.measure).groupby("place", sort=False)
            if {a, b} <= set(own["mixer"])
        ]
        for question, rows in studies
    ]
    corrected = iter(stats.holm([one.p for own in tests for one in own]))
    return [[replace(one, corrected=next(corrected)) for one in own] for own in tests]


def compared(test: str, where: str, a: str, b: str, own: pd.DataFrame) -> Hypothesis:
    """The difference of two mixers by the values of one place."""
    own = own[own["mixer"].isin((a, b))]
    by_seed = own.pivot(index="seed", columns="mixer", values="value")
    gains = (by_seed[a] - by_seed[b]).dropna().tolist()
    lost = own["seed"][own["value"].isna()].nunique()
    return Hypothesis(where, a, b, stats.mean_over_seeds(gains), stats.paired(gains, test), lost)


def of_results(results: dict[str, Any]) -> list[Table]:
    """The tables of a planned study's results.json; empty for a study without a plan."""
    question = Question.stored(results)
    if question is None:
        return []
    rows = rows_of(results)
    (tests,) = differences([(question, rows)])
    return tables(question, rows, tests)


def tables(question: Question, rows: Sequence[Row], tests: Sequence[Hypothesis]) -> list[Table]:
    """The statistic of the plan, which `differences` returned, and the means behind it, as text."""
    sentences = (answer(question, tests), about(question)), ("", "")
    cells = table(question, tests), table_of_means(question, rows)
    return [Table(*said, tuple(header), lines) for said, (header, *lines) in zip(sentences, cells, strict=True)]


# --- as text ---------------------------------------------------------------------------------------------------------
DIGITS = {"score": 3, "losses": 3, "speed": 0, "capacity": 2}
NO_INTERVAL = "no interval"
MEANS = dict.fromkeys(DIGITS, "mean ± standard deviation") | {
    "capacity": "length held: geometric mean (within one standard deviation)"
}


def table(question: Question, tests: Sequence[Hypothesis]) -> list[list[str]]:
    """A header, and a row for each comparison."""
    digits = DIGITS[question.measure]
    rows = [["difference", "at", "seeds", "mean", "95 % interval", "p", "p by Holm", "verdict"]]
    for one in tests:
        name = f"{question.name(one.a)} - {question.name(one.b)}"
        mean, seeds = f"{one.gain.value:+.{digits}f}" if one.gain.n else "–", out_of(one.gain.n, one.lost)
        interval = interval_text(one.gain, digits, " … ")
        rows.append([name, one.where, seeds, mean, interval, f"{one.p:.2g}", f"{one.corrected:.2g}", one.verdict])
    return placed(rows)


def table_of_means(question: Question, rows: Sequence[Row]) -> list[list[str]]:
    """A header, and a row for each mixer and place. The last cell counts the values that are bounds."""
    ends = set[float]().union(*(bounds(question.measure, row) for row in rows))
    cells = [["mixer", "at", "seeds", MEANS[question.measure], "seeds at an end of the range"]]
    for (place, mixer), own in values(rows, question.measure).groupby(["place", "mixer"], sort=False)["value"]:
        seeds, shown = out_of(own.count(), own.isna().sum()), mean_and_spread(question.measure, own.dropna())
        cells.append([question.name(mixer), place, seeds, shown, str(own.isin(ends).sum())])
    return placed(cells)


def mean_and_spread(measure: str, own: pd.Series) -> str:
    if own.empty:
        return "diverged"
    mean, spread, digits = own.mean(), own.std() if len(own) > 1 else 0.0, DIGITS[measure]
    if measure == "capacity":
        return f"{2**mean:.0f} ({2 ** (mean - spread):.0f} to {2 ** (mean + spread):.0f})"
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def interval_text(mean: Mean, digits: int, to: str = " to ") -> str:
    low, high = mean.interval
    return NO_INTERVAL if math.isinf(low) else f"{low:+.{digits}f}{to}{high:+.{digits}f}"


def placed(rows: list[list[str]]) -> list[list[str]]:
    """The table without the place, its second column, if that is the same everywhere."""
    return rows if len({row[1] for row in rows[1:]}) > 1 else [[row[0], *row[2:]] for row in rows]


def about(question: Question) -> str:
    """What the tables show, as a sentence."""
    test = "Student's t" if question.test == "t" else "Wilcoxon's test"
    return f"In {UNITS[question.measure]}. Differences are paired by seed; p by {test}, corrected by Holm's rule."


def answer(question: Question, tests: Sequence[Hypothesis]) -> str:
    """The primary comparison as a sentence."""
    if not tests or not tests[0].gain.n:
        a, b = map(question.name, question.pairs[0])
        return f"{question.text} {a} and {b} have no seed in which neither diverged."
    one, digits = tests[0], DIGITS[question.measure]
    where = f" at {one.where}" if len({other.where for other in tests}) > 1 else ""
    interval = interval_text(one.gain, digits)
    interval = interval if interval == NO_INTERVAL else f"95 % interval {interval}"
    return (
        f"{question.text} {question.name(one.a)} less {question.name(one.b)}{where}: {one.gain.value:+.{digits}f} "
        f"{UNITS[question.measure]} ({interval}, {seeds_of(one.gain.n, one.lost)}, p by Holm {one.corrected:.2g}): "
        f"{one.verdict}."
    )


# --- measures --------------------------------------------------------------------------------------------------------
def score(row: Row) -> dict[str, float]:
    return {row["comparison"]: row["score"]}


def losses(row: Row) -> dict[str, float]:
    """The losses of a language model: over all tokens, over those that a score names, and in rows of each length."""
    named = {name: loss for name, loss in row["scores"].items() if name.startswith("loss ")}
    by_length = {f"rows of {n:,}": loss for n, loss in sorted(row["by_length"].items())}
    by_place = {"all tokens": row["loss"]} | named | by_length
    return {f"{row['comparison']}, {name}": loss for name, loss in by_place.items()}


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
    if measure == "capacity":  # runs of a search and those that diverged have no scores by length
        return {math.log2(end(row["by_length"])) for end in (min, max) if row["by_length"]}
    return {float(row["steps"])} if measure == "speed" else set()


def values(rows: Sequence[Row], measure: str) -> pd.DataFrame:
    """A line for each reported run and each place that its comparison has: place, mixer, seed and the value, NaN where
    the run diverged. Runs with a score come first."""
    reported = sorted((row for row in rows if not row["trial"]), key=lambda row: row["score"] is None)
    measured = [({} if row["score"] is None else MEASURES[measure](row)) for row in reported]
    places: dict[str, dict[str, None]] = {}  # of a comparison, in order
    for row, own in zip(reported, measured, strict=True):
        places.setdefault(row["comparison"], {}).update(dict.fromkeys(own))
    lines = [
        (place, row["mixer"], row["seed"], own.get(place, math.nan))
        for comparison, own_places in places.items()
        for place in own_places
        for row, own in zip(reported, measured, strict=True)
        if row["comparison"] == comparison
    ]
    table = pd.DataFrame(lines, columns=["place", "mixer", "seed", "value"])
    return table.assign(value=table["value"].astype(float).replace([math.inf, -math.inf], math.nan))


MEASURES = {"score": score, "losses": losses, "speed": speed, "capacity": capacity}
UNITS = {
    "score": "units of the final score",
    "losses": "nats per token",
    "speed": f"steps to a score of {HELD:g}, all steps where it is not reached",
    "capacity": f"doublings of the length held, the longest row with a score of at least {HELD:g}",
}
