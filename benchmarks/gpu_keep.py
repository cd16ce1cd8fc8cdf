"""Keeps the rows of a run of gpu.py: in results/gpu_models.jsonl, and the efficiencies of the dry run.

python benchmarks/gpu_keep.py FOLDER/rows.jsonl
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

from headrace.training import recipes
from headrace.training.efficiency import FILE
from headrace.training.machine import peak
from headrace.training.model import flops_per_token as count
from headrace.training.model import meta_model
from record import RESULTS

KEPT = RESULTS / "gpu_models.jsonl"
SHAPE = {"layers": 24, "hidden_size": 1024, "length": 4096, "vocab_size": 32_000, "micro_batch": 4, "tie": True}
COLUMNS = (
    "mixer", "efficiency", "tokens_per_second", "flops_per_token", "compiled", "machine", "torch", "triton", "commit",
    "date",
)  # fmt: skip


def efficiencies(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest way of each of headrace's mixers, compiled or not."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["stage"] != "train" or "tokens_per_second" not in row:
            continue
        mixer, *options = row["name"].split(":")[1:]
        if mixer in found and found[mixer]["tokens_per_second"] >= row["tokens_per_second"]:
            continue
        flops, most = flops_of(mixer), peak(row["machine"])
        if most is None:
            raise SystemExit(f"{row['machine']} has no peak in training/machine.py")
        found[mixer] = {name: row.get(name, "") for name in COLUMNS} | {
            "mixer": mixer, "compiled": "compiled" in options, "flops_per_token": flops,
            "tokens_per_second": round(row["tokens_per_second"]),
            "efficiency": round(row["tokens_per_second"] * flops / most, 4),
        }  # fmt: skip
    return list(found.values())


def flops_of(mixer: str) -> int:
    recipe, _ = recipes.load("paper-340m", SHAPE | {"mixer": mixer})
    return count(meta_model(recipe), recipe)


def main(path: str) -> None:
    text = Path(path).read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    new = efficiencies(rows)
    with FILE.open(newline="", encoding="utf-8") as file:
        kept = {row["mixer"]: row for row in csv.DictReader(file)}
    kept |= {row["mixer"]: row for row in new}
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())
    with KEPT.open("a", encoding="utf-8") as file:
        file.write(text)
    print("\n".join(f"{row['mixer']:24} {row['tokens_per_second']:>9} tokens/s {row['efficiency']:.1%}" for row in new))


if __name__ == "__main__":
    main(sys.argv[1])
