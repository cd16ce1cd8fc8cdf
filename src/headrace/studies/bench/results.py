"""Measures the points of a plan, and derives from them the rows of the CSV, the overhead of competition and the
compression of a key-value cache to a state.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ... import zoo
from ...spec.linear import MixerSpec
from ...utils.environment import environment
from ...utils.integrity import read_result, write_result
from ..report.numbers import spread
from .measure import measure
from .models import PEERS, cache_bytes
from .plan import MEASURED, BenchPlan, Point

COLUMNS = (
    "date", "commit", "processor", "device", "threads", "headrace", "torch", "transformers", "python", "dtype", "clock",
    "layers", "hidden_size", "heads", "what", "model", "length", "batch", "rounds", "seconds", "spread",
    "tokens_per_second", "bytes", "how", "left_out",
)  # fmt: skip
# The form of a measured point.
RESULT = {"point": {"what": str}, "environment": {}, "clock": str, "models": {...: {}}}


def complete(plan: BenchPlan, wanted: list[Point], folder: Path, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measures the points that the folder does not hold yet, and returns all points of the folder."""
    for i, point in enumerate(wanted, 1):
        path = point.path(folder)
        tell(f"{i} of {len(wanted)}: {point.what}, {point.length:,} × {point.batch}")
        if not path.exists():
            torch.set_num_threads(plan.threads)
            models = measure(point, plan)
            about = environment() | {"threads": plan.threads, "date": datetime.now().isoformat(timespec="seconds")}
            write_result(path, {"point": vars(point), "environment": about, "clock": plan.clock, "models": models})
    held = [read_result(path, RESULT) for path in (folder / "points").glob("*.json")]
    return sorted(held, key=lambda one: (MEASURED.index(one["point"]["what"]), *list(one["point"].values())[1:]))


def rows(held: list[dict[str, Any]], plan: BenchPlan) -> list[dict[str, Any]]:
    """Rows of the CSV, one for each model at each point."""
    found = []
    for one in held:
        point = Point(**one["point"])
        for name, measured in one["models"].items():
            seconds = measured.get("seconds") or []
            row = one["environment"] | one["point"] | {"model": name, "dtype": plan.dtype, "clock": one["clock"]}
            row |= {name: getattr(plan.shape, name) for name in ("layers", "hidden_size", "heads")}
            row |= {"rounds": len(seconds), **{key: measured.get(key) for key in ("bytes", "how", "left_out")}}
            if seconds:
                middle = median(seconds)
                row |= {"seconds": f"{middle:.6g}", "spread": rounded(spread(seconds))}
                row["tokens_per_second"] = f"{point.tokens / middle:.5g}"
            found.append({name: row.get(name) for name in COLUMNS})
    return found


def rounded(number: float | None) -> str | None:
    return None if number is None else f"{number:.3f}"


def write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


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


def backbones(plan: BenchPlan) -> list[str]:
    return [name for name in plan.models if f"softmax-{name}" in plan.models]


def overhead(held: list[dict[str, Any]], backbone: str, what: str) -> Overhead:
    ratios: list[float] = []
    for one in held:
        base, competing = (one["models"].get(name, {}) for name in (backbone, f"softmax-{backbone}"))
        if one["point"]["what"] == what and "left_out" not in base | competing:
            pairs = zip(costs(competing, what), costs(base, what), strict=True)
            ratios += [with_it / without for with_it, without in pairs]
    return Overhead(backbone, what, tuple(ratios))


def costs(measured: dict[str, Any], what: str) -> list[float]:
    return [measured["bytes"]] if what == "memory" else measured["seconds"]


@dataclass(frozen=True)
class Compression:
    """Size of a key-value cache over the size of the state of a linear mixer, after a context of t tokens. `predicted`:
    by the formula t (d_k + d_v) / (d_k d_v), which is 2t/d for d_k = d_v = d; `measured`: by bytes of all tensors."""

    model: str
    context: int
    predicted: float
    measured: float


def compressions(held: list[dict[str, Any]], plan: BenchPlan) -> list[Compression]:
    found = []
    for one in held:
        context = one["point"]["length"]
        for name, measured in one["models"].items():
            spec = None if name in PEERS else zoo.mixer(name)
            if one["point"]["what"] == "decoding" and isinstance(spec, MixerSpec) and measured.get("bytes"):
                K, V = spec.head_dims(plan.shape.hidden_size, plan.shape.heads)
                cache = cache_bytes("transformer", plan.shape, context, plan.itemsize)
                found.append(Compression(name, context, context * (K + V) / (K * V), cache / measured["bytes"]))
    return found
