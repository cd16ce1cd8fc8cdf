"""The fraction of a GPU's peak that training steps reach, as measured by `benchmarks/gpu.py`, by mixer."""

import csv
import statistics
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "efficiency.csv"


class Efficiency(NamedTuple):
    """Model FLOPs utilization, and where it is from."""

    fraction: float
    source: str


@cache
def measured() -> dict[str, dict[str, str]]:
    """Returns the measured rows by mixer."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return {row["mixer"]: row for row in csv.DictReader(file)}


def efficiency(mixer: str) -> Efficiency:
    """Returns the efficiency of a mixer, an expression; of one that was not measured, the median of the others."""
    rows = measured()
    name = mixer.partition("(")[0].strip()
    if name in rows:
        row = rows[name]
        return Efficiency(float(row["efficiency"]), f"measured with {name} on one {row['machine']}")
    median = statistics.median(float(row["efficiency"]) for row in rows.values())
    return Efficiency(median, f"an assumption, the median of {len(rows)} measured mixers")
