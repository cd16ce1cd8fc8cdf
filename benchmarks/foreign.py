"""Laws on models of other libraries, one process and one file of results each.

    python benchmarks/foreign.py                 # every target of research/docs/verified.md
    python benchmarks/foreign.py transformers:mamba2

FLA's layers are targets where flash-linear-attention is installed. Without a GPU they run in Triton's interpreter, with
the corrections of tests/ops/interpreted, and on a part of the laws, in some minutes each.

A file of benchmarks/results/verify is what `headrace verify TARGET --json` prints, without the programs.
`python -m research.generated` makes the table of research/docs/verified.md from the files.
"""

import datetime
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.verification.foreign import MODELS
from record import RESULTS

FOLDER = RESULTS / "verify"
FLA = "GatedLinearAttention", "MultiScaleRetention", "LinearAttention"  # others take hours in the interpreter
LAWS = "causal,packed = separate,left-padded = bare,pieces = whole,decoding = whole,copied state,batch size"
INTERPRETED = "import shims, fla_shims; shims.install(); fla_shims.install(); from headrace.cli import main; main()"


def targets() -> list[str]:
    fla = FLA if find_spec("fla.layers") else ()
    return [*(f"transformers:{model_type}" for model_type in MODELS), *(f"fla:{layer}" for layer in fla)]


def file_of(target: str) -> Path:
    return FOLDER / f"{target.replace(':', '-')}.json"


def measured(target: str) -> dict[str, Any]:
    """The record of a target, from a process of its own."""
    start, words, environment = ["-m", "headrace"], [], {}
    if target.startswith("fla:"):
        start, words = ["-c", INTERPRETED], ["--laws", LAWS]
        paths = str(Path(__file__).parents[1] / "tests" / "ops" / "interpreted"), os.environ.get("PYTHONPATH", "")
        environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-W", "ignore", *start, "verify", target, "--device", "cpu", "--json", *words]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode > 1:
        raise RuntimeError(f"{target}: {done.stderr.strip()}")
    (record,) = json.loads(done.stdout)
    for law in record["laws"]:
        law.pop("snippet", None)
    return {"date": datetime.date.today().isoformat()} | record


def text_of(record: dict[str, Any]) -> str:
    """A record as JSON with a line for each law."""
    laws = ",\n  ".join(json.dumps(law, ensure_ascii=False) for law in record["laws"])
    rest = json.dumps(record | {"laws": "…"}, indent=1, ensure_ascii=False)
    return rest.replace('"…"', f"[\n  {laws}\n ]") + "\n"


def main(names: Annotated[list[str] | None, typer.Argument(help="Targets.", metavar="TARGET")] = None) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for target in names or targets():
        record = measured(target)
        file_of(target).write_text(text_of(record), encoding="utf-8")
        broken = [law["law"] for law in record["laws"] if law["verdict"] in ("breaks", "raises")]
        print(f"{target}: {', '.join(broken) or 'every law holds'}", flush=True)


if __name__ == "__main__":
    typer.run(main)
