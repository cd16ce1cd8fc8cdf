"""The hypotheses of a planned study: what it measures of a run, and the differences of two mixers, paired by seed. The
family that Holm's rule corrects is every difference of all studies that are given to `differences`."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ..report import differences as report
from ..report.differences import Difference, Unit
from ..report.numbers import out_of
from ..report.page import Section
from .plan import Question
from .rows import HELD, Row
from .rows import rows as rows_of


def differences(studies: Sequence[tuple[Question, Sequence[Row]]]) -> list[list[Difference]]:
    """Every difference of each study (its question and its runs) in the plan's order, corrected over those of all."""
    return report.judged([
        [
            compared(question, str(place), a, b, own)
            for a, b in question.pairs
            for place, own in values(rows, question.measure).groupby("place", sort=False)
            if {a, b} <= set(own["mixer"])
        ]
        for question, rows in studies
    ])  # fmt: skip


def compared(question: Question, where: str, a: str, b: str, own: pd.DataFrame) -> Difference:
    """The difference of two mixers by the values of one place, over the seeds in which both have one."""
    own = own[own["mixer"].isin((a, b))]
    by_seed = own.pivot(index="seed", columns="mixer", values="value")
    gains = (by_seed[a] - by_seed[b]).dropna().tolist()
    lost, (first, second) = own["seed"][own["value"].isna()].nunique(), map(question.name, (a, b))
    return report.over_seeds(first, second, gains, UNITS[question.measure], question.test, where=where, lost=lost)


def of_results(results: dict[str, Any]) -> tuple[str, list[Section]] | None:
    """The answer and the tables of a planned study's results.json; None for a study without a plan."""
    question = Question.stored(results)
    if question is None:
        return None
    rows = rows_of(results)
    (tests,) = differences([(question, rows)])
    return answer(question, tests), sections(question, rows, tests)


# --- as text ---------------------------------------------------------------------------------------------------------
MEANS = "mean ± standard deviation"
MEAN_LENGTHS = "length held: geometric mean (within one standard deviation)"


def answer(question: Question, tests: Sequence[Difference]) -> str:
    """The primary comparison as a sentence."""
    where = f"At {tests[0].where}, " if len({other.where for other in tests}) > 1 else ""
    if not tests or not tests[0].mean.n:
        a, b = map(question.name, question.pairs[0])
        return f"{question.text} {where}{a} and {b} have no seed in which neither diverged."
    return f"{question.text} {where}{tests[0]}."


def sections(question: Question, rows: Sequence[Row], tests: Sequence[Difference]) -> list[Section]:
    """The statistic of the plan, which `differences` returned, and the means behind it."""
    test = "Student's t" if question.test == "t" else "Wilcoxon's test"
    about = f"In {UNITS[question.measure].name}. Differences are paired by seed; p by {test}, corrected by Holm's rule."
    (header, *judged), (names, *means) = report.table(tests, "at"), table_of_means(question, rows)
    return [
        Section("The statistic of the plan", (about,), header=header, rows=judged),
        Section("The means behind it", header=names, rows=means),
    ]


def table_of_means(question: Question, rows: Sequence[Row]) -> list[list[str]]:
    """A header, and a row for each mixer and place. The last cell counts the values that are bounds."""
    means = MEAN_LENGTHS if question.measure == "capacity" else MEANS
    cells = [["mixer", "at", "seeds", means, "seeds at an end of the range"]]
    for (place, mixer), own in values(rows, question.measure).groupby(["place", "mixer"], sort=False)["value"]:
        seeds, shown = out_of(own.count(), own.isna().sum()), mean_and_spread(question.measure, own.dropna())
        ends = set[float]().union(*(bounds(question.measure, row) for row in rows if row["comparison"] == place))
        cells.append([question.name(mixer), place, seeds, shown, str(own.isin(ends).sum())])
    return report.placed(cells)


def mean_and_spread(measure: str, own: pd.Series) -> str:
    if own.empty:
        return "diverged"
    mean, spread, digits, several = own.mean(), own.std(), UNITS[measure].digits, len(own) > 1
    if measure == "capacity":
        return f"{2**mean:.0f}" + (f" ({2 ** (mean - spread):.0f} to {2 ** (mean + spread):.0f})" if several else "")
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if several else "")


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
    return {row["comparison"]: float(row["steps"] if row["reached"] is None else row["reached"])}


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
    the run diverged. Runs with a score come first. A comparison in which all runs diverged has one place, its name."""
    reported = sorted((row for row in rows if not row["trial"]), key=lambda row: row["score"] is None)
    measured = [({} if row["score"] is None else MEASURES[measure](row)) for row in reported]
    places: dict[str, dict[str, None]] = {row["comparison"]: {} for row in rows if not row["trial"]}  # in order
    for row, own in zip(reported, measured, strict=True):
        places[row["comparison"]].update(dict.fromkeys(own))
    lines = [
        (place, row["mixer"], row["seed"], own.get(place, math.nan))
        for comparison, own_places in places.items()
        for place in own_places or [comparison]
        for row, own in zip(reported, measured, strict=True)
        if row["comparison"] == comparison
    ]
    table = pd.DataFrame(lines, columns=["place", "mixer", "seed", "value"])
    return table.assign(value=table["value"].astype(float).replace([math.inf, -math.inf], math.nan))


MEASURES = {"score": score, "losses": losses, "speed": speed, "capacity": capacity}
# Verdicts do not say which is better: of losses and of steps, less is.
UNITS = {
    measure: Unit(name, "", digits, verdicts=("more", "less"), joint="−")
    for measure, name, digits in (
        ("score", "units of the final score", 3),
        ("losses", "nats per token", 3),
        ("speed", f"steps to a score of {HELD:g}, all steps where it is not reached", 0),
        ("capacity", f"doublings of the length held, the longest row with a score of at least {HELD:g}", 2),
    )
}
