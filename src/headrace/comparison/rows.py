"""The runs of a study as rows of a table, one for each run, trials of a search among them: runs.csv.

A report's statistics and a study's tables are computed from these rows alone.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files.results import finite, restored
from ..tasks import TASKS, Metric

COLUMNS = (
    "commit", "comparison", "mixer", "seed", "trial", "lr", "steps", "metric", "score", "loss", "reached", "converged",
    "parameters", "state_bytes", "seconds", "by_length", "scores",
)  # fmt: skip
TABLES = ("by_length", "scores")  # the columns that are JSON
HELD = 0.9  # smallest score at which a model still solves a task
SETTLED = 0.02  # the largest change of a loss that has settled, as a part of its whole fall
RULE = (
    "converged: the lowest held-out loss of the first two thirds of the steps and the final loss are above the lowest "
    f"loss by at most {SETTLED:.0%} of its fall"
)

Row = dict[str, Any]


def rows(results: dict[str, Any]) -> list[Row]:
    """The runs of a results.json.

    score, loss: at the end, None for a run that diverged. reached: the first evaluated step with a score of at least
    HELD, None without one and where less is better. trial: whether the run belongs to a search. by_length: {length:
    score} on held-out rows of these lengths, empty for a task without. scores: {name: score}, all of the task's, at the
    end.
    """
    plans = results["study"]["plans"]
    metrics = {plan["name"]: TASKS[plan["task"]["name"]].metric for plan in plans}
    metrics |= {trial["name"]: metrics[plan["name"]] for plan in plans for trial in plan["trials"]}
    runs = [*((arm, True) for arm in results["trials"]), *((arm, False) for arm in results["arms"])]
    return [row(arm, metrics[arm["comparison"]], trial) for arm, trial in runs]


def row(arm: dict[str, Any], metric: Metric, trial: bool) -> Row:
    columns = {name: arm[name] for name in COLUMNS if name in arm} | {"trial": trial, "metric": metric.name}
    columns |= {"score": arm["scores"].get(metric.name), "loss": arm["scores"].get("loss")}
    lengths = {int(length): score for length, score in arm.get("by_length", {}).items()}
    above = (point["step"] for point in arm["curve"] if point["scores"].get(metric.name, 0) >= HELD)
    reached = next(above, None) if metric.higher_is_better else None
    return columns | {"reached": reached, "converged": converged(arm), "by_length": lengths}


def converged(arm: dict[str, Any]) -> bool:
    """Whether the held-out loss fell, and training went on until it had settled, by RULE."""
    points = [(point["step"], point["scores"]["loss"]) for point in arm["curve"] if point["scores"]]
    if arm["diverged"] or len(points) < 2:
        return False
    (_, first), (last, end) = points[0], points[-1]
    best = min(loss for _, loss in points)
    before = min(loss for step, loss in points if step <= 2 / 3 * last)
    return first > best and max(before, end) - best <= SETTLED * (first - best)


def write(rows: Sequence[Row], path: Path, columns: Sequence[str] = COLUMNS) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(row | {name: json.dumps(finite(row[name])) for name in TABLES} for row in rows)


def read(path: Path) -> list[Row]:
    """The rows that `write` wrote; numbers are numbers again ("nan" too), and an empty cell is None."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: value(name, text) for name, text in line.items()} for line in csv.DictReader(file)]


def value(name: str, text: str) -> Any:
    if name in TABLES:
        scores = restored(json.loads(text or "{}"))
        return {int(key) if key.isdecimal() else key: score for key, score in scores.items()}
    if not text:
        return None
    if name in ("trial", "converged"):
        return text == "True"
    if name in ("seed", "steps", "reached", "parameters", "state_bytes"):
        return int(text)
    return float(text) if name in ("lr", "score", "loss", "seconds") else text
