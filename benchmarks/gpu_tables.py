"""The measurements of gpu_stages.py in docs/benchmarks.md, from results/gpu.csv: `python benchmarks/gpu_tables.py`."""

import re
from collections import defaultdict

import record
from record import RESULTS, newest
from tables import table

MORE = {"launches": ".0f", "memory": ",.0f", "host": ".1f"}  # of forward and backward, and their digits
Cells = dict[tuple[str, str], dict[str, dict[str, str]]]  # by (subject, shape), then by measure


def cells(stage: str) -> Cells:
    """The rows of a stage, at their newest."""
    found: Cells = defaultdict(dict)
    rows = [row for row in record.read(RESULTS / "gpu.csv") if row["stage"] == stage]
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
        family, _, sizes = shape.partition(" ")
        ways = (text for way in ("fwd", "f+b") for text in (number(cell[way]), rate(cell, sizes, way, copy)))
        more = (number(cell[f"f+b {name}"], digits) for name, digits in MORE.items())
        lines.append([f"{family}: {runner}", *ways, *more])
    header = ["", "forward, ms", "of a copy", "forward+backward, ms", "of a copy", "launches", "MiB", "host, ms"]
    return table(header, sorted(lines, key=lambda line: line[0]))


def train() -> str:
    rows = [
        [subject.partition(" | ")[0], number(cell["parameters"], ",.0f"), number(cell["training"], ",.0f"),
         number(cell["memory"], ",.0f")]
        for (subject, _), cell in cells("train").items()
    ]  # fmt: skip
    return table(["", "parameters", "tokens/s", "MiB"], rows)


def decode() -> str:
    batches: dict[str, dict[str, str]] = defaultdict(dict)
    for (subject, shape), cell in cells("decode").items():
        batches[subject.replace(" | triton", "").replace(" | ", ", ")][shape] = number(cell["decoding"], ",.0f")
    shapes = list(dict.fromkeys(shape for own in batches.values() for shape in own))
    lines = [[name, *(own.get(shape, "") for shape in shapes)] for name, own in batches.items()]
    return table(["tokens/s", *shapes], lines)


def lines() -> list[str]:
    machine = cells("ceilings")["machine", "bfloat16"]
    about = "{machine}, torch {torch}, Triton {triton}, commit {commit}, {date:.10}".format(**machine["copy"])
    copy, product = float(machine["copy"]["value"]), float(machine["product"]["value"])
    op_shape = next(iter(cells("op")))[1].partition(" ")[2]
    train_shape = next(iter(cells("train")))[1]
    return [
        f"{about}; bfloat16.", f"A copy moves {copy:,.0f} GB/s, a large product {product:.0f} TFLOP/s.",
        "", f"The op at [B, T, H, K, V] = {op_shape}:", "", op(copy),
        "", f"Training steps of whole models, {train_shape}, not compiled, by the backend `triton`:", "", train(),
        "", "Decoding by the backend `triton`, without and with a CUDA graph:", "", decode(),
    ]  # fmt: skip


if __name__ == "__main__":
    print("\n".join(lines()))
