"""Measures the points of a plan, and derives from them the rows of the CSV and the overhead of competition."""

import csv
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ..files import engine
from ..files.engine import Tell
from ..files.environment import environment
from ..files.workers import Worker
from ..report.numbers import spread
from .measure import measure
from .models import checkpoint_config
from .plan import MEASURED, BenchPlan, Point

COLUMNS = (
    "date", "commit", "processor", "device", "threads", "headrace", "torch", "transformers", "python", "dtype", "clock",
    "layers", "hidden_size", "heads", "what", "model", "length", "batch", "rounds", "seconds", "spread",
    "tokens_per_second", "bytes", "how", "left_out",
)  # fmt: skip
# The form of a measured point.
RESULT = {"point": {"what": str}, "environment": {}, "clock": str, "models": {...: {}}}


def complete(plan: BenchPlan, wanted: list[Point], folder: Path, tell: Tell) -> list[engine.Row]:
    """Measures the points that the folder does not hold yet, and returns all points of the folder."""
    points = [
        engine.Point(f"{point.what}, {point.length:,} × {point.batch}", point.path, point, RESULT) for point in wanted
    ]
    engine.run(folder, plan.claim(), points, partial(measured, plan=plan), engine.lines(tell, points))
    results = [engine.read(path, RESULT) for path in (folder / "points").glob("*.json")]
    return sorted(results, key=lambda one: (MEASURED.index(one["point"]["what"]), *list(one["point"].values())[1:]))


def measured(point: Point, worker: Worker, plan: BenchPlan) -> engine.Row:
    models = measure(point, plan)
    about = environment() | {"threads": plan.threads, "date": datetime.now().isoformat(timespec="seconds")}
    return {"point": vars(point), "environment": about, "clock": plan.clock, "models": models}


def rows(results: list[dict[str, Any]], plan: BenchPlan) -> list[dict[str, Any]]:
    """Rows of the CSV, result for each model at each point."""
    lines = []
    for result in results:
        point = Point(**result["point"])
        for name, measured in result["models"].items():
            seconds = measured.get("seconds") or []
            row = (
                result["environment"] | result["point"] | {"model": name, "dtype": plan.dtype, "clock": result["clock"]}
            )
            row |= sizes(name, plan)
            row |= {"rounds": len(seconds), **{key: measured.get(key) for key in ("bytes", "how", "left_out")}}
            if seconds:
                middle = median(seconds)
                row |= {"seconds": f"{middle:.6g}", "spread": rounded(spread(seconds))}
                row["tokens_per_second"] = f"{point.tokens / middle:.5g}"
            lines.append({name: row.get(name) for name in COLUMNS})
    return lines


def sizes(name: str, plan: BenchPlan) -> dict[str, int]:
    """Layers, width and heads of a model: those of the plan, or of the checkpoint."""
    if (config := checkpoint_config(name)) is None:
        return {size: getattr(plan.shape, size) for size in ("layers", "hidden_size", "heads")}
    return {"layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "heads": config.num_heads}


def rounded(number: float | None) -> str | None:
    return None if number is None else f"{number:.3f}"


def write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


FORMS = {"softmax": "", "paper-softmax": ", published form"}  # prefix of a mixer with competition -> how rows name it


@dataclass(frozen=True)
class Overhead:
    """Overhead of competition on a backbone. `ratios`: cost with competition over cost without, for each round of each
    point."""

    backbone: str
    what: str
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        if not self.ratios:
            return "–"
        middle, around = median(self.ratios), spread(self.ratios)
        return f"{middle - 1:+.1%} " + ("(one pair)" if around is None else f"± {around * middle / 2:.1%}")


def competing_versions(plan: BenchPlan) -> list[tuple[str, str]]:
    """(backbone, form) of every model whose backbone is measured too."""
    return [(name, form) for name in plan.models for form in FORMS if f"{form}-{name}" in plan.models]


def overhead(results: list[dict[str, Any]], backbone: str, what: str, form: str = "softmax") -> Overhead:
    ratios: list[float] = []
    for result in results:
        base, competing = (result["models"].get(name, {}) for name in (backbone, f"{form}-{backbone}"))
        if result["point"]["what"] == what and "left_out" not in base | competing:
            pairs = zip(costs(competing, what), costs(base, what), strict=True)
            ratios += [with_it / without for with_it, without in pairs]
    return Overhead(backbone, what, tuple(ratios))


def costs(measured: dict[str, Any], what: str) -> list[float]:
    return [measured["bytes"]] if what == "memory" else measured["seconds"]
