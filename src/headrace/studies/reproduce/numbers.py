"""Reads the reproduced numbers from the output of the steps, and pairs them with the published ones."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ...report.numbers import NORMAL, half_interval
from ...utils.integrity import read_json, read_result
from .execute import done
from .experiment import Experiment, Scale, combinations, commands, run_folder


@dataclass(frozen=True)
class Number:
    value: float
    reach: float | None = None  # half the width of the 95 % interval; None: not known


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    published: float | None
    ours: Number | None
    comparable: bool = True  # whether ours is of the model that was published

    @property
    def difference(self) -> float | None:
        if self.ours is None or self.published is None or not self.comparable:
            return None
        return self.ours.value - self.published

    @property
    def within(self) -> bool | None:
        """Whether the published number lies within the 95 % interval of ours; None if there is no interval."""
        if self.difference is None or self.ours is None or self.ours.reach is None:
            return None
        return abs(self.difference) <= self.ours.reach


def cells(experiment: Experiment, scale: Scale, root: Path) -> list[Cell]:
    found = []
    for row in experiment.rows:
        for i, (column, place) in enumerate(experiment.columns.items()):
            ours = each(scale, place, row.at, root)
            if row.minus is not None:
                ours = list(map(less, ours, each(scale, place, row.at | row.minus, root)))  # a pair for each seed
            published = row.published[i] if row.published else None
            found.append(Cell(row.name, column, published, mean(ours), scale.comparable))
    return found


def each(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> list[Number | None]:
    """A number for each value of the axes that `at` leaves open (seeds), None where a step is not finished. Empty if
    the scale does not have the model."""
    if any(value not in scale.axes.get(name, []) for name, value in at.items()):
        return []
    open_axes = {name: [at[name]] if name in at else values for name, values in scale.axes.items()}
    read = next(READERS[kind] for kind in READERS if kind in place)
    return [read(scale, place, one, root) for one in combinations(open_axes)]


def mean(numbers: list[Number | None]) -> Number | None:
    """The mean over seeds, with an interval by Student's t; a single number keeps its own interval. None if a number is
    not there."""
    there = [one for one in numbers if one is not None]
    if not there or len(there) < len(numbers):
        return None
    if len(there) == 1:
        return there[0]
    values = [one.value for one in there]
    return Number(fmean(values), half_interval(values))


def less(first: Number | None, second: Number | None) -> Number | None:
    if first is None or second is None:
        return None
    reach = None if first.reach is None or second.reach is None else math.hypot(first.reach, second.reach)
    return Number(first.value - second.value, reach)


def evaluated(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> Number | None:
    """A number from the results.json of `headrace eval`. place["mean"]: the tasks whose mean is taken."""
    path = root / place["eval"] / run_folder(scale, root, at).name / "results.json"
    if not path.exists():
        return None
    results, factor = read_result(path)["results"], place.get("times", 1)
    items = place.get("mean") or [place["item"]]
    scores = [score(results.get(item, {}), place["metric"]) for item in items]
    there = [one for one in scores if one is not None]
    if len(there) < len(scores):
        return None
    reaches = [one.reach for one in there if one.reach is not None]
    reach = math.hypot(*reaches) / len(there) * factor if len(reaches) == len(there) else None
    return Number(factor * fmean(one.value for one in there), reach)


def score(result: dict[str, Any], metric: str) -> Number | None:
    if f"{metric},none" not in result:
        return None
    error = result.get(f"{metric}_stderr,none")  # can be "N/A", or 0 if all rows are equal; neither is a spread
    return Number(result[f"{metric},none"], NORMAL * error if isinstance(error, float) and error else None)


def logged(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> Number | None:
    """The last value of a number in the history of a training run."""
    path = run_folder(scale, root, at) / "model" / "history.json"
    points = read_json(path) if path.exists() else []
    return next((Number(point[place["history"]]) for point in reversed(points) if place["history"] in point), None)


def printed(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> Number | None:
    """A number in the JSON output of the step whose command contains place["command"]."""
    part = place["command"].format(**at)
    command = next(one for one in commands(scale, root) if part in shlex.join(one))
    kept = done(root, command)
    if kept is None:
        return None
    found = json.loads(kept["said"])
    for name in place["printed"].split("."):
        found = found[name]
    return Number(found * place.get("times", 1))


def compared(scale: Scale, place: dict[str, Any], at: dict[str, Any], root: Path) -> Number | None:
    """The mean over seeds of a final score in the results.json of `headrace compare`."""
    path = root / place["compare"] / "results.json"
    arms = read_result(path)["arms"] if path.exists() else []
    return mean(
        [Number(arm["scores"][place["metric"]]) for arm in arms if arm["mixer"] == at["mixer"] and arm["scores"]]
    )


READERS: dict[str, Callable[..., Number | None]] = {
    "eval": evaluated, "history": logged, "printed": printed, "compare": compared,
}  # fmt: skip
