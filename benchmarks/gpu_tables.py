"""The measurements on a GPU in research/docs/benchmarks.md. They are those of the last run of gpu.py in
results/gpu_models.jsonl; rows of its stage op may be older, and are in results/gpu.csv too.

python benchmarks/gpu_tables.py show                       prints them
python benchmarks/gpu_tables.py keep FOLDER/rows.jsonl     adds the rows of a run, and the efficiencies of the dry run
"""

import csv
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import typer

import record
from headrace.training import recipes
from headrace.training.machine import MEASURED, peak
from headrace.training.model import flops_per_token, meta_model
from record import RESULTS, newest
from tables import table

KEPT = RESULTS / "gpu_models.jsonl"
SHAPE = {"layers": 24, "hidden_size": 1024, "length": 4096, "vocab_size": 32_000, "micro_batch": 4, "tie": True}
COLUMNS = (
    "mixer", "efficiency", "tokens_per_second", "flops_per_token", "compiled", "machine", "torch", "triton", "commit",
    "date",
)  # fmt: skip
# In the kept run without FLA's own check: under Triton 3.4 to 3.7.0 on Hopper the gradients of this model are wrong.
WRONG = ("fla:gated-deltanet",)
MORE = {"launches": ".0f", "memory": ",.0f", "host": ".1f"}  # of forward and backward, and their digits
app = typer.Typer(add_completion=False, help=__doc__)
Cells = dict[tuple[str, str], dict[str, dict[str, str]]]  # by (subject, shape), then by measure


def cells(stage: str) -> Cells:
    """The newest rows of a stage of the op."""
    found: Cells = defaultdict(dict)
    rows = [row for row in record.read(RESULTS / "gpu.csv") if row["stage"] == stage]
    rows += [row for row in kept() if row.get("name") == stage and "value" in row]
    for row in newest(rows, "subject", "shape", "measure"):
        found[row["subject"], row["shape"]][row["measure"]] = row
    return found


def number(row: dict[str, str] | None, digits: str = ".2f") -> str:
    return "" if row is None else format(float(row["value"]), digits)


def moved(shape: str, way: str) -> float:
    """The bytes of bfloat16 tensors that a call reads or writes: q, k, v and the output, and each one's gradient."""
    B, T, H, K, V = map(int, re.findall(r"\d+", shape))
    return 2 * B * T * H * (2 * K + 2 * V) * (2 if way == "f+b" else 1)


def rate(cell: dict[str, dict[str, str]], shape: str, way: str, copy: float) -> str:
    """The share of the rate of a copy at which the call moves these bytes."""
    return f"{100 * moved(shape, way) / float(cell[way]['value']) / 1e6 / copy:.0f} %"


def op(copy: float) -> str:
    lines = []
    for (runner, shape), cell in cells("op").items():
        # In a graph, where there is one: no launch waits for Python there.
        cell |= {way: cell.get(f"{way} graph", cell[way]) for way in ("fwd", "f+b")}
        family, _, sizes = shape.partition(" ")
        ways = (text for way in ("fwd", "f+b") for text in (number(cell[way]), rate(cell, sizes, way, copy)))
        more = (number(cell[f"f+b {name}"], digits) for name, digits in MORE.items())
        lines.append([f"{family}: {runner}", *ways, *more])
    header = ["", "forward, ms", "of a copy", "forward+backward, ms", "of a copy", "launches", "MiB", "host, ms"]
    return table(header, sorted(lines, key=lambda line: line[0]))


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in KEPT.read_text("utf-8").splitlines()]


def models() -> list[dict[str, Any]]:
    """The rows of the last run of gpu.py that have a result: of headrace's training steps, those with compiled blocks.
    `model` is the name without its options."""
    rows = [row for row in kept() if "subject" not in row]
    last = max(row["date"] for row in rows)
    found = (row for row in rows if row["date"] == last and "name" in row and "failed" not in row)
    named = (row | {"model": ":".join(row["name"].split(":")[:2])} for row in found)
    shown = (row for row in named if row["stage"] != "train" or "compiled" in row["name"])
    return [row for row in shown if row["model"] not in WRONG]


def trained(rows: list[dict[str, Any]]) -> str:
    """Training steps, headrace's compiled and FLA's."""
    steps = {row["model"]: row for row in rows if "ms" in row}
    lines = []
    for name in (name for name in steps if name.startswith("headrace")):
        ours, theirs = steps[name], steps.get(name.replace("headrace", "fla"))
        beside = ["", "", ""]
        if theirs is not None:
            ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
            beside = [f"{theirs['tokens_per_second']:,.0f}", f"{theirs['peak_gib']:.1f}", f"{ratio:.2f}"]
        size = f"{ours['parameters'] / 1e6:.0f}M"
        shown = f"{ours['tokens_per_second']:,.0f}", f"{ours['ms']:.0f}", f"{ours['peak_gib']:.1f}"
        lines.append([name.partition(":")[2], size, *shown, *beside])
    header = ["", "parameters", "tokens/s", "ms", "GiB", "FLA: tokens/s", "FLA: GiB", "tokens/s over FLA's"]
    return table(header, sorted(lines))


def profiled(rows: list[dict[str, Any]]) -> str:
    """Device time of a training step by class."""
    profiles = sorted((row["model"].replace(":", " "), row) for row in rows if "classes" in row)
    kinds = ["products", "recurrence", "convolution", "elementwise", "copies", "optimizer"]
    lines = []
    for name, row in profiles:
        ms = {kind: sum(x[0] for key, x in row["classes"].items() if key.startswith(kind)) for kind in kinds}
        lines.append([name, f"{row['device_ms']:.0f}", *(f"{x:.1f}" for x in ms.values()), f"{row['launches']:,}"])
    return table(["ms", "all", *kinds, "launches"], lines)


def decoded(rows: list[dict[str, Any]]) -> str:
    """Whole calls of `generate`."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in (row for row in rows if "batch" in row):
        case = f"B={row['batch']}, {row['new']} tokens{', sampled' if row['sampled'] else ''}"
        found[row["name"].replace(":", " ")][case] = f"{row['tokens_per_second']:,.0f}"
    cases = list(dict.fromkeys(case for own in found.values() for case in own))
    return table(["tokens/s", *cases], [[name, *(own.get(case, "") for case in cases)] for name, own in found.items()])


# The block sizes that took the place of those in use, by shape and kernel, as results/gpu_kernels.csv has them.
TAKEN = {
    **{(shape, "prepare"): "num_warps=4 num_stages=1 BK=32" for shape in ("gla", "kda")},
    **{(shape, "gradients"): "num_warps=4 num_stages=1 BK=16 BV=64" for shape in ("gla", "kda")},
    **{(shape, "scan"): "num_warps=8 num_stages=2 BV=32" for shape in ("gla", "kda")},
    ("mamba2", "gradients"): "num_warps=4 num_stages=1 BK=64 BV=64",
    ("gated-deltanet", "scan"): "num_warps=8 num_stages=1 BV=64",
}


def kernels() -> str:
    """Kernels whose block sizes were changed: times of a launch before and since, and how far results moved."""
    rows = {(row["shape"], row["launch"], row["sizes"]): row for row in record.read(RESULTS / "gpu_kernels.csv")}
    lines = []
    for (shape, launch, sizes), row in rows.items():
        if sizes == TAKEN.get((shape, row["kernel"])) and (shape, launch) != ("gated-deltanet", "states"):
            before = rows[shape, launch, ""]["ms"]
            lines.append([shape, launch, sizes, f"{float(before):.3f}", f"{float(row['ms']):.3f}", row["difference"]])
    return table(["", "launch", "sizes", "before, ms", "since, ms", "difference"], lines)


def lines() -> list[str]:
    machine = cells("ceilings")["machine", "bfloat16"]
    about = "{machine}, torch {torch}, Triton {triton}, commit {commit}, {date:.10}".format(**machine["copy"])
    copy, product = float(machine["copy"]["value"]), float(machine["product"]["value"])
    op_shape = next(iter(cells("op")))[1].partition(" ")[2]
    rows = models()
    run = "{machine}, torch {torch}, Triton {triton}, commit {commit}, {date:.10}".format(**rows[0])
    return [
        f"{run}; whole models of 24 layers of width 1,024, bfloat16, FLA {rows[0]['fla']}.",
        "", "Training steps of 4×4,096 tokens, loss and AdamW included, with compiled blocks:", "", trained(rows),
        "", "Device time of such a step:", "", profiled(rows),
        "", "Calls of `generate` after a prompt of 16 tokens, by a CUDA graph for headrace:", "", decoded(rows),
        "", "Launches at these shapes whose block sizes were changed before that run:", "", kernels(),
        "", f"{about}; bfloat16. A copy moves {copy:,.0f} GB/s, a large product {product:.0f} TFLOP/s.",
        "", f"The op at [B, T, H, K, V] = {op_shape}:", "", op(copy),
    ]  # fmt: skip


# --- what is kept of a run -------------------------------------------------------------------------------------------
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
    return flops_per_token(meta_model(recipe), recipe)


@app.command()
def keep(path: Path) -> None:
    text = path.read_text("utf-8")
    new = efficiencies([json.loads(line) for line in text.splitlines()])
    known = {row["mixer"]: row for row in [*record.read(MEASURED), *new]}
    with MEASURED.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known.values())
    with KEPT.open("a", encoding="utf-8") as file:
        file.write(text)
    print("\n".join(f"{row['mixer']:24} {row['tokens_per_second']:>9} tokens/s {row['efficiency']:.1%}" for row in new))


@app.command()
def show() -> None:
    print(*lines(), sep="\n")


if __name__ == "__main__":
    app()
