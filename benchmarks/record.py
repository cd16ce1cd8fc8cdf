"""Results as CSV rows, each with what it takes to repeat it."""

import csv
import datetime
import platform
import subprocess
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def environment(device: str) -> dict:
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


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def append(path: Path, about: dict, rows: list) -> None:
    """Add dataclass instances as lines; the file's columns are `about`'s, then theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns, fresh = [*about, *(f.name for f in fields(rows[0]))], not path.exists()
    if not fresh and (found := path.read_text().partition("\n")[0].split(",")) != columns:
        raise ValueError(f"{path} has the columns {', '.join(found)}; expected {', '.join(columns)}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(about | asdict(row) for row in rows)
