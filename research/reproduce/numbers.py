"""Reads the reproduced numbers from what the steps wrote, and pairs them with the published ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace.files.results import read_result
from headrace.report.stats import mean_over_seeds, student
from headrace.training import recipes
from headrace.training.model import counted
from headrace.utils.integrity import read_json

from .experiment import Experiment, Scale, combinations, run_folder


@dataclass(frozen=True)
class Number:
    """A number of one run, or the mean over runs that did not diverge."""

    value: float  # NaN if all runs diverged
    reach: float | None = None  # half the width of the 95 % interval; None: not known
    runs: int = 1  # that did not diverge
    lost: int = 0  # runs that diverged


DIVERGED = Number(math.nan, runs=0, lost=1)


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    published: float | None
    ours: Number | None
    comparable: bool = True  # whether ours is of the model that was published

    @property
    def difference(self) -> float | None:
        if self.ours is None or self.published is None or not self.comparable or not self.ours.runs:
            return None
        return self.ours.value - self.published

    @property
    def within(self) -> bool | None:
        """Whether the published number lies within the 95 % interval of ours; None if there is no interval, or if runs
        diverged."""
        if self.difference is None or self.ours is None or self.ours.reach is None or self.ours.lost:
            return None
        return abs(self.difference) <= self.ours.reach


def cells(experiment: Experiment, scale: Scale, root: Path) -> list[Cell]:
    cells = []
    for row in experiment.rows:
        for i, (column, place) in enumerate(experiment.columns.items()):
            ours = each(scale, place, row.at, root)
            if row.minus is not None:
                ours = list(map(less, ours, each(scale, place, row.at | row.minus, root)))  # a pair for each seed
            published = row.published[i] if row.published else None
            cells.append(Cell(row.name, column, published, mean(ours), scale.comparable))
    return cells


def each(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> list[Number | None]:
    """A number for each value of the axes that `at` leaves open (seeds), None where a step is not finished. Empty if
    the scale does not have the model."""
    if any(value not in scale.axes.get(name, []) for name, value in at.items()):
        return []
    open_axes = {name: [at[name]] if name in at else values for name, values in scale.axes.items()}
    read = next(READERS[kind] for kind in READERS if kind in place)
    return [read(scale, place, one, root) for one in combinations(open_axes)]


def mean(numbers: list[Number | None]) -> Number | None:
    """The mean over the seeds that did not diverge, with an interval by Student's t; a single number keeps its own
    interval. None if a number is not there."""
    there = [one for one in numbers if one is not None]
    if not there or len(there) < len(numbers):
        return None
    finished, lost = [one for one in there if one.runs], sum(one.lost for one in there)
    if len(finished) < 2:
        return replace(finished[0] if finished else DIVERGED, lost=lost)
    over_seeds = mean_over_seeds([one.value for one in finished])
    reach = over_seeds.reach if math.isfinite(over_seeds.reach) else None
    return Number(over_seeds.value, reach, over_seeds.n, lost)


def less(first: Number | None, second: Number | None) -> Number | None:
    if first is None or second is None:
        return None
    if first.lost or second.lost:  # the runs that are left may be of different seeds
        return DIVERGED
    reach = None if first.reach is None or second.reach is None else math.hypot(first.reach, second.reach)
    return Number(first.value - second.value, reach)


def evaluated(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> Number | None:
    """A number from the results.json of `headrace eval`. place["mean"]: the tasks whose mean is taken."""
    path = root / place["eval"] / run_folder(scale, root, at).name / "results.json"
    if not path.exists():
        return None
    whole, factor = read_result(path), place.get("times", 1)
    scores = [score(whole, item, place["metric"]) for item in place.get("mean") or [place["item"]]]
    there = [one for one in scores if one is not None]
    if len(there) < len(scores):
        return None
    if not all(one.runs for one in there):
        return DIVERGED
    reaches = [one.reach for one in there if one.reach is not None]
    reach = math.hypot(*reaches) / len(there) * factor if len(reaches) == len(there) else None
    return Number(factor * fmean(one.value for one in there), reach)


def score(whole: dict[str, Any], item: str, metric: str) -> Number | None:
    """A score from the results of the harness, with an interval by Student's t over its rows."""
    result, rows = whole["results"].get(item, {}), whole.get("n-samples", {}).get(item, {}).get("effective", 0)
    if f"{metric},none" not in result:
        return None
    error = result.get(f"{metric}_stderr,none")  # can be "N/A", or 0 if all rows are equal; neither is a spread
    known = isinstance(error, float) and error and rows > 1
    value = result[f"{metric},none"]
    return Number(value, student(rows - 1) * error if known else None) if math.isfinite(value) else DIVERGED


def logged(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> Number | None:
    """The last value of a number in the history of a training run, which is null where it is not finite."""
    path = run_folder(scale, root, at) / "model" / "history.json"
    points = read_json(path) if path.exists() else []
    values = [point[place["history"]] for point in points if place["history"] in point]
    return None if not values else DIVERGED if values[-1] is None else Number(values[-1])


def parameters(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> Number:
    """The parameters of a recipe's model, in one way of counting."""
    recipe, _ = recipes.load(place["recipe"].format(**at), {"mixer": at["mixer"]})
    return Number(counted(recipe).parameters[place["parameters"]] * place.get("times", 1))


def compared(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> Number | None:
    """The mean over seeds of a final score in the results.json of `headrace compare`."""
    path = root / place["compare"] / "results.json"
    arms = read_result(path)["arms"] if path.exists() else []
    own = [arm["scores"] for arm in arms if arm["mixer"] == at["mixer"]]
    return mean([Number(scores[place["metric"]]) if scores else DIVERGED for scores in own])


READERS: dict[str, Callable[..., Number | None]] = {
    "eval": evaluated, "history": logged, "parameters": parameters, "compare": compared,
}  # fmt: skip
