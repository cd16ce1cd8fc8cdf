"""Everything that is claimed of a GPU, in one run of some minutes on a bare machine, the most important first.

    PYTHONPATH=src python benchmarks/gpu.py --minutes 6.5 --output FOLDER [--stage NAME ...]
    SMALL=1 ... --stage train        the same program on small models, also without a GPU

Stages: correctness (the op against the loop in float64), train and decode (headrace's models of 340M), fla-train and
fla-decode (those of flash-linear-attention, autotuned among FEW=3 configurations a kernel), tests (tests/gpu); and, if
it is asked for, op (times, memory and launches of the backends). `gpu_tables.py keep` keeps the rows of a run.
Models have a process each: all compile side by side, and then measure one after the other. A row is in
FOLDER/rows.jsonl as soon as it is measured; what fails is a row with the error. FOLDER/log.txt has what all stages
printed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
MIXERS = "gla", "gated-deltanet", "kda", "mamba2", "retnet", "softmax-gla", "softmax-gated-deltanet", "transformer"
FLA = "gla", "gated-deltanet", "kda", "retnet", "mamba2"
PROFILED = "gla", "gated-deltanet", "kda", "mamba2"


class Stage(NamedTuple):
    """A command with the seconds that it may take, and the names that it measures in turn."""

    seconds: float
    command: tuple[str, ...]
    names: tuple[str, ...] = ()
    beside: bool = False  # whether each name has a process of its own, which compiles beside the others


def models(what: str) -> tuple[str, ...]:
    return str(HERE / "gpu_models.py"), what


COMPILED = tuple(f"headrace:{mixer}:compiled{':profile' * (mixer in PROFILED)}" for mixer in MIXERS)
DECODED = "headrace:gla", "headrace:gated-deltanet", "headrace:mamba2", "headrace:gla:compiled", "headrace:softmax-gla"
EAGER = "headrace:gla:profile", "headrace:gated-deltanet:profile"
PYTEST = (
    "-m pytest tests/gpu --maxfail=20 -n 8 -p no:cacheprovider -p no:benchmark -p no:jaxtyping -p no:cov -W default "
    "--durations=15 -rfE --tb=short"
)
STAGES = {
    "correctness": Stage(50, (str(HERE / "gpu_op.py"),), ("correctness",)),
    "train": Stage(220, models("train"), (*COMPILED, *EAGER), beside=True),
    "fla-train": Stage(220, models("train"), tuple(f"fla:{m}{':profile' * (m in PROFILED)}" for m in FLA), beside=True),
    "decode": Stage(220, models("decode"), DECODED, beside=True),
    "fla-decode": Stage(220, models("decode"), ("fla:gla",), beside=True),
    "tests": Stage(180, tuple(PYTEST.split())),
    "op": Stage(480, (str(HERE / "gpu_op.py"),), ("ceilings", "op", "shapes", "long")),
}  # fmt: skip
ASKED = ("op",)  # stages that run only where they are asked for


class Run:
    """The folder, the clock and the rows of a run."""

    def __init__(self, folder: Path, minutes: float):
        self.folder, self.start, self.over = folder, time.perf_counter(), time.perf_counter() + 60 * minutes
        self.rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        caches = Path(tempfile.gettempdir(), "headrace-gpu")
        self.environment = os.environ | {
            "HEADRACE_NATIVE": "off", "PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "FLA_CACHE_RESULTS": "1",
            "TRITON_CACHE_AUTOTUNING": "1", "TRITON_PRINT_AUTOTUNING": "0", "TOKENIZERS_PARALLELISM": "false",
            "KINETO_LOG_LEVEL": "6", "HF_HUB_OFFLINE": "1", "TURNS": str(folder / "turns"),
            "COMPILING_S": str(int(60 * minutes * 0.6)), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip

    def told(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:4.0f} s] {text}", flush=True)

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def started(self, log: str, command: tuple[str, ...], **more: str) -> subprocess.Popen:
        """Starts Python in a process group of its own; its errors go to the log."""
        with (self.folder / f"{log}.txt").open("a", encoding="utf-8") as errors:
            return subprocess.Popen(
                [sys.executable, *command], stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=self.environment | more, cwd=HERE.parent,
            )  # fmt: skip


def end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def follow(process: subprocess.Popen, seconds: float, each: Callable[[str], None]) -> int | None:
    """Passes on what a process prints, and ends it after some seconds. Returns its exit code; None: it was ended."""
    late = threading.Event()

    def end_late() -> None:
        late.set()
        end(process)

    timer = threading.Timer(max(seconds, 0.0), end_late)
    timer.start()
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            each(line.rstrip("\n"))
    code = process.wait()
    timer.cancel()
    return None if late.is_set() else code


def measure(run: Run, name: str, stage: Stage, about: dict[str, Any]) -> None:
    """Runs a stage: its names in one process after the other, or each in a process of its own."""
    groups = [[one] for one in stage.names] if stage.beside else [list(stage.names)]
    threads = [threading.Thread(target=measure_names, args=(run, name, stage, names, about)) for names in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_names(run: Run, name: str, stage: Stage, left: list[str], about: dict[str, Any]) -> None:
    """Runs a stage with names, and again with those that are left where a process could not go on."""
    late, log = min(time.perf_counter() + stage.seconds, run.over), run.folder / "log.txt"
    began = ""

    def each(line: str) -> None:
        nonlocal began
        with log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if not line.startswith("{"):
            print(line[:200], flush=True)
            return
        row = json.loads(line)
        if row.pop("begun", False):
            began = row["name"]
            return
        run.append(about | {"stage": name} | {key: x for key, x in row.items() if key != "stage"})
        run.told(f"{name} {short(row)}")

    while True:
        process = run.started("log", (*stage.command, *left))
        code = follow(process, late - time.perf_counter(), each)
        if code != 0:
            run.append(about | {"stage": name, "name": began or name, "code": code})
            run.told(f"{name} {began} ended with {'its time' if code is None else f'code {code}'}")
        left = left[left.index(began) + 1 :] if began in left else []
        if code == 0 or code is None or not left:
            break


def short(row: dict[str, Any]) -> str:
    shown = (f"{key}={x:,.4g}" if isinstance(x, float) else f"{key}={x}" for key, x in row.items() if key != "longest")
    return " ".join(shown)[:400]


def environment(commit: str) -> dict[str, Any]:
    """What it takes to repeat a row."""
    import torch

    import headrace

    def version(module: str) -> str:
        try:
            return __import__(module).__version__
        except ImportError:
            return ""

    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"), "commit": commit, "headrace": headrace.__version__,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
        **{module: version(module) for module in ("triton", "transformers", "fla")},
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        if "tokens_per_second" in row:
            where = (
                f"B={row['batch']} {row['new']}{' sampled' * row['sampled']}"
                if "batch" in row
                else f"{row['ms']:.1f} ms"
            )
            peak, engine = row["peak_gib"] or 0.0, row.get("engine", "")
            rate = f"{row['tokens_per_second']:12,.0f} tokens/s"
            lines.append(f"{row['stage']:10} {row['name']:42} {where:18} {rate} {peak:6.1f} GiB {engine}")
        elif "failed" in row:
            lines.append(f"{row['stage']:10} {row['name']:42} FAILED {row['failed'][:120]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--stage", action="append", choices=list(STAGES))
    parser.add_argument("--name", action="append", help="model to measure, of those of the stages; repeatable")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu")
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    run = Run(given.output, given.minutes)
    stages = {name: STAGES[name] for name in given.stage or STAGES if given.stage or name not in ASKED}
    if given.name:
        stages = {key: s._replace(names=tuple(x for x in s.names if x in given.name)) for key, s in stages.items()}
    about = environment(given.commit)
    together = [name for name, stage in stages.items() if stage.beside]
    for name in [name for name in stages if name not in together]:
        if time.perf_counter() < run.over:
            measure(run, name, stages[name], about)
    threads = [threading.Thread(target=measure, args=(run, name, stages[name], about)) for name in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(table(run.rows))


if __name__ == "__main__":
    main()
