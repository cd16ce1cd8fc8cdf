"""The op on a GPU by stages: the rates that limit it, errors, times, memory and launches of every backend.

    PYTHONPATH=src python benchmarks/gpu_stages.py                    everything, the most valuable first
    PYTHONPATH=src python benchmarks/gpu_stages.py --stage op         one of STAGES; repeatable
    python benchmarks/gpu_stages.py --dry                             the same program on small shapes on the CPU

FlashQLA and Helion's examples (a checkout of pytorch/helion on PYTHONPATH) are compared with if they can be imported.
The backends are those of `headrace.backends()`. A row is appended to the CSV file as soon as it is measured, so that an
interrupted run keeps what it found; what fails is a row with the error, and exit code 1.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before PyTorch: its profiler would write a line per measurement

import torch

from gpu_measure import Machine
from gpu_op import ceilings, correctness, long, op, shapes
from gpu_sizes import DRY, FULL, Found, Sizes, failure
from record import append, environment

STAGES: dict[str, Callable[[Machine, Sizes], Iterator[Found]]] = {
    "ceilings": ceilings,
    "correctness": correctness,
    "op": op,
    "shapes": shapes,
    "long": long,
}
RESULTS = Path(__file__).parent / "results" / "gpu.csv"
ENDED = "the stage"  # subject of a row whose error has ended its stage
WIDEST = 60  # characters of a note in the table; the file has all


@dataclass(frozen=True)
class Row:
    """One measured number: a line of the CSV file."""

    headrace: str
    triton: str
    stage: str
    subject: str
    shape: str
    measure: str
    value: float
    unit: str
    note: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if anything failed."""
    options = parser().parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print("PyTorch finds no GPU; expected one, or --dry", file=sys.stderr)
        return 2
    machine, sizes = Machine("cpu" if options.dry else "cuda"), DRY if options.dry else FULL
    rows: list[Row] = []
    about = environment(machine.device)
    over = time.perf_counter() + 60 * options.minutes
    stages = list(options.stage or STAGES)
    while stages:
        stage, start, began = stages.pop(0), time.perf_counter(), len(rows)
        for row in measured(stage, machine, sizes):
            append(options.output, about, [vars(row)])
            rows.append(row)
            if time.perf_counter() > over:
                break
        print(f"\n{stage} ({time.perf_counter() - start:.0f} s)\n{table(rows[began:])}", flush=True)
        if any(row.subject == ENDED for row in rows[began:]):  # after some errors a process cannot use the GPU any more
            return in_a_new_process(stages, over, options) or 1
        if time.perf_counter() > over:
            print(f"\n{options.minutes:g} minutes are over; the rest of {stage} and later stages are left out")
            break
    failed = sum(row.measure == "failed" for row in rows)
    print(f"\n{len(rows)} rows in {options.output}, of them {failed} failures")
    return 1 if failed else 0


def in_a_new_process(stages: list[str], over: float, options: argparse.Namespace) -> int:
    """Runs these stages in a new process, in the time that is left. Returns its exit code."""
    if not stages:
        return 0
    minutes = max(0.0, over - time.perf_counter()) / 60
    command = [sys.executable, __file__, "--minutes", str(minutes), "--output", str(options.output)]
    command += ["--dry"] * options.dry + [word for stage in stages for word in ("--stage", stage)]
    return subprocess.run(command).returncode


def parser() -> argparse.ArgumentParser:
    about, _, rest = (__doc__ or "").partition("\n")
    found = argparse.ArgumentParser(description=about, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("--stage", action="append", choices=list(STAGES), help="stage to run; repeatable [default: all]")
    found.add_argument("--minutes", type=float, default=9.0, help="no measurement begins after so many [default: 9]")
    found.add_argument("--dry", action="store_true", help="small shapes on the CPU, to see that everything runs")
    found.add_argument("--output", type=Path, default=RESULTS, help="CSV file to append to")
    return found


def measured(stage: str, machine: Machine, sizes: Sizes) -> Iterator[Row]:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = ""
    import headrace

    try:
        for found in STAGES[stage](machine, sizes):
            yield Row(headrace.__version__, triton, stage, *found)
    except Exception as error:
        yield Row(headrace.__version__, triton, stage, *failure(ENDED, "", error))


def table(rows: list[Row]) -> str:
    """A line for each subject and shape, a column for each measure."""
    measures = list(dict.fromkeys(row.measure for row in rows))
    units = {row.measure: row.unit for row in rows}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells.setdefault((row.shape, row.subject), {})[row.measure] = row.note[:WIDEST] or f"{row.value:.4g}"
    head = ["shape", "subject", *(f"{name} [{units[name]}]" if units[name] else name for name in measures)]
    lines = [head, *([*where, *(found.get(name, "") for name in measures)] for where, found in cells.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join(padded)


if __name__ == "__main__":
    sys.exit(main())
