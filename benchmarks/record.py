"""Results as CSV rows, each with what it takes to repeat it. Needs PyTorch alone."""

import csv
import datetime
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from headrace.files.environment import processor

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def environment(device: str = "cpu") -> Row:
    def installed(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    def git(*arguments):
        try:
            done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        except FileNotFoundError:  # a bare machine has no git
            return ""
        return done.stdout.strip()

    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD") + ("-changed" if git("status", "--porcelain", "-uno") else ""),
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        **{name.replace("-", "_"): installed(name) for name in ("torch", "transformers", "fla-core")},
    }


def append(path: Path, about: Row, rows: Sequence[Row]) -> None:
    """Add lines to a file; its columns are `about`'s, then the rows'."""
    columns = [*about, *rows[0]]
    if path.exists() and (header := path.read_text().partition("\n")[0].split(",")) != columns:
        raise ValueError(f"{path} has the columns {', '.join(header)}; expected {', '.join(columns)}")
    _write(path, columns, [about | row for row in rows], "a")


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows of a study that the engine ran in place of those in the file. Columns: those of all rows."""
    flat = [{name: row["environment"][name] for name in ("commit", "processor", "torch")} | row for row in rows]
    _write(path, [name for name in dict.fromkeys(chain(*flat)) if name != "environment"], flat, "w")


def _write(path: Path, columns: Sequence[str], rows: Iterable[Row], mode: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = mode == "w" or not path.exists()
    with path.open(mode, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def newest(rows: Iterable[Row], *key: str) -> list[Row]:
    """The last row for each key, in the order of first appearance."""
    return list({tuple(row[k] for k in key): row for row in rows}.values())


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], rule: Sequence[str] | None = None) -> list[str]:
    """The lines of a table. rule: the alignment of each column."""
    return [f"| {' | '.join(row)} |" for row in (header, rule or ["---"] * len(header), *rows)]
