"""The differences that a report judges: one verdict, one table, one family.

A difference is called one if its p is below LEVEL by Holm's rule over all differences of the report that can have a
verdict, so that a report over equal models with normal gains calls a difference in at most 5 % of cases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .numbers import out_of, seeds_of
from .stats import SEEDS, Mean, holm, mean_over_seeds, paired

LEVEL = 0.05
BETTER, WORSE, ALIKE, FEW = "better", "worse", "not told apart", "too few seeds"
UNKNOWN = "–"
SPELT = 4  # largest number of differences that the answer of a report spells out


@dataclass(frozen=True)
class Unit:
    """How a difference is shown: its name in a sentence and, in a cell, its short name.

    scale: what the value is multiplied by. verdicts: on a value above 0 and on one below. joint: between the names.
    noun: what is paired."""

    name: str
    short: str
    digits: int
    scale: float = 1.0
    verdicts: tuple[str, str] = (BETTER, WORSE)
    joint: str = "over"
    noun: str = "seed"

    def show(self, value: float) -> str:
        return f"{value * self.scale:+.{self.digits}f}".replace("-", "−")

    def interval(self, mean: Mean) -> str:
        low, high = mean.interval
        return "no interval" if math.isinf(low) else f"{self.show(low)} to {self.show(high)}"


@dataclass(frozen=True)
class Difference:
    """The values of a less those of b, paired by seed or by row.

    where: in which comparison, or of what. kind: why the two are compared. lost: seeds in which a or b diverged.
    undecided: why there can be no verdict. corrected: p by Holm over the report."""

    a: str
    b: str
    mean: Mean
    p: float
    unit: Unit
    where: str = ""
    kind: str = ""
    lost: int = 0
    undecided: str | None = None
    corrected: float = math.nan

    @property
    def name(self) -> str:
        return f"{self.a} {self.unit.joint} {self.b}"

    @property
    def verdict(self) -> str:
        if self.undecided is not None:
            return self.undecided
        return self.unit.verdicts[self.mean.value < 0] if self.corrected < LEVEL else ALIKE

    def cells(self) -> list[str]:
        """The number of seeds or rows, the mean, its interval, p, p by Holm and the verdict."""
        n = out_of(self.mean.n, self.lost)
        if not math.isfinite(self.mean.value):
            return [n, *[UNKNOWN] * 4, self.verdict]
        mean = f"{self.unit.show(self.mean.value)} {self.unit.short}".strip()
        corrected = UNKNOWN if math.isnan(self.corrected) else f"{self.corrected:.2g}"
        return [n, mean, self.unit.interval(self.mean), f"{self.p:.2g}", corrected, self.verdict]

    def __str__(self) -> str:
        if not math.isfinite(self.mean.value):
            return f"{self.name}: {self.verdict}"
        said = [] if math.isinf(self.mean.reach) else [f"95 % interval {self.unit.interval(self.mean)}"]
        said += [seeds_of(self.mean.n, self.lost, self.unit.noun)]
        said += [] if math.isnan(self.corrected) else [f"p by Holm {self.corrected:.2g}"]
        size = f"{self.unit.show(self.mean.value)} {self.unit.name}"
        return f"{self.name}: {size} ({', '.join(said)}): {self.verdict}"


def over_seeds(a: str, b: str, gains: Sequence[float], unit: Unit, test: str = "t", **more: Any) -> Difference:
    """The difference of two mixers by its value for each seed; fewer than SEEDS values give no verdict. more: other
    fields."""
    few = {"undecided": FEW} if len(gains) < SEEDS else {}
    return Difference(a, b, mean_over_seeds(gains), paired(gains, test), unit, **few | more)


def judged(families: Sequence[Sequence[Difference]], others: int = 0) -> list[list[Difference]]:
    """The differences with p corrected over all those of all families that can have a verdict. others: the number of
    further differences, from which these were chosen."""
    able = [one.p for own in families for one in own if one.undecided is None]
    corrected = iter(holm([*able, *[1.0] * others]))
    return [[one if one.undecided else replace(one, corrected=next(corrected)) for one in own] for own in families]


def answer(differences: Sequence[Difference]) -> str:
    """The verdicts as a clause: up to SPELT differences with their numbers; of more, how many have each verdict, and
    the names of those that were told apart. "" without differences."""
    several = len({one.where for one in differences}) > 1
    if len(differences) <= SPELT:
        return "; ".join(f"{one.where}: {one}" if several else str(one) for one in differences)
    found: dict[str, list[str]] = {}
    for one in differences:
        found.setdefault(one.verdict, []).append(f"{one.a} on {one.where}" if several else one.a)
    called = {verdict for one in differences for verdict in one.unit.verdicts}
    names = {verdict: f" ({', '.join(own)})" if verdict in called else "" for verdict, own in found.items()}
    parts = (f"{len(own)} {verdict}{names[verdict]}" for verdict, own in found.items())
    return f"of {len(differences)} differences, {'; '.join(parts)}"


def table(differences: Sequence[Difference], place: str) -> list[list[str]]:
    """A header, and a row for each difference. place: the name of `where`, which is left out if it is the same
    everywhere."""
    paired = next((f"{one.unit.noun}s" for one in differences), "seeds")
    header = ["difference", place, paired, "mean", "95 % interval", "p", "p by Holm", "verdict"]
    return placed([header, *([one.name, one.where, *one.cells()] for one in differences)])


def placed(rows: list[list[str]]) -> list[list[str]]:
    """The table without its second column if that is the same everywhere."""
    return rows if len({row[1] for row in rows[1:]}) > 1 else [[row[0], *row[2:]] for row in rows]
