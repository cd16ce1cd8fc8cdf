"""Runs the steps of an experiment in order. A finished step is recorded in done/<step>.json and not run again."""

import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from ...utils import provenance
from ...utils.errors import InputError
from ...utils.integrity import digest, read_json, record, sha256, write_json
from ...utils.processes import POSIX, end_with_parent
from .. import engine
from ..engine import Point, Row, Tell
from ..workers import Worker
from .experiment import called

WRITTEN = "niah_single_1"  # the suite whose rows are written when they are needed
RECORD = {"said": (str, None)}  # the form of the record of a finished step
HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]


def downloads(steps: list[list[str]]) -> str:
    """A sentence on what the steps download. InputError if a local file or folder that a step reads does not exist."""
    downloaded: dict[str, None] = {}
    for name, *arguments in map(called, steps):
        options = dict(itertools.pairwise(arguments))
        texts = itertools.takewhile(lambda argument: not argument.startswith("--"), arguments)
        if name in ("prepare", "compare"):
            named = [*texts, *([options["--tokenizer"]] if "--tokenizer" in options else [])]
            downloaded |= {one: None for one in named if not is_local(one)}
        elif name == "eval" and options["--suite"] == WRITTEN:
            continue
        elif name == "eval" and "--data" not in options:
            downloaded[f"the rows of {options['--suite']}"] = None
        elif name == "eval" and not Path(options["--data"]).is_dir():
            raise InputError(f"--data={options['--data']!r}; expected a folder")
    if not downloaded:
        return "Nothing is downloaded."
    return f"Downloaded: {', '.join(downloaded)}. To use local files instead, give --text FILE … and --data FOLDER."


def is_local(name: str) -> bool:
    if not Path(name).exists() and Path(name).suffix:
        raise InputError(f"{name!r} is not a file; expected the training text as --text FILE")
    return Path(name).exists()


def mark(command: list[str]) -> Path:
    """The file in which a finished step is recorded."""
    return Path("done", f"{hashlib.sha256(shlex.join(command).encode()).hexdigest()[:16]}.json")


def done(root: Path, command: list[str]) -> Row | None:
    """The record of a finished step: its seconds and, for a step with --json, its output; None if not finished."""
    path = root / mark(command)
    return engine.read(path, RECORD) if path.exists() else None


def execute(steps: list[list[str]], root: Path, tell: Tell) -> None:
    """Runs the steps that are not finished yet.

    Raises:
        InputError: a step fails (the steps before it stay finished), or a finished step had other inputs.
    """
    provenance.record_versions(root, not (root / "done").exists())
    for i, step in enumerate(steps, 1):
        refuse_other_inputs(root, i, step)
    points = [Point(shlex.join(step), mark(step), (i, step), RECORD) for i, step in enumerate(steps, 1)]
    measure = partial(run_step, root=root)
    engine.run(root, None, points, measure, engine.lines(tell, points, "step "))
    for step in steps:
        begun(root, step).unlink(missing_ok=True)


def refuse_other_inputs(root: Path, i: int, command: list[str]) -> None:
    """InputError if the step is finished, and its inputs have changed since."""
    finished = done(root, command)
    if finished is None:
        return
    now = inputs(root, command)
    before = finished.get("inputs", now)
    if changed := [name for name, content in now.items() if before.get(name) != content]:
        raise InputError(
            f"input {changed[0]!r} of step {i} has changed since the step was run ({str(root / mark(command))!r}); "
            "expected another --output"
        )


def run_step(numbered: tuple[int, list[str]], worker: Worker, root: Path) -> Row:
    """The record of a step. Its seconds are None if it was killed between its end and its record."""
    i, command = numbered
    read = inputs(root, command)
    record = {"command": shlex.join(command), "seconds": None, "said": None, "inputs": read}
    if ended_unrecorded(root, command, read):
        worker.report("already finished")
        return record
    begin(root, command, read)
    started = time.monotonic()
    code, printed = run(started_by(command), "--json" in command)
    if code:
        raise InputError(f"step {i} ended with exit status {code}: {shlex.join(command)}")
    return record | {"seconds": round(time.monotonic() - started, 1), "said": printed}


def made(command: list[str]) -> Path | None:
    """The folder that a step makes atomically, so that the step has ended when the folder exists; None without one."""
    if "headrace" not in command or called(command)[0] != "prepare":
        return None
    output = dict(itertools.pairwise(called(command))).get("--output")
    return None if output is None else Path(output)


def begun(root: Path, command: list[str]) -> Path:
    return (root / mark(command)).with_suffix(".begun")


def begin(root: Path, command: list[str], inputs: dict[str, str]) -> None:
    """Records that a step begins, if it makes a folder that does not exist yet."""
    folder = made(command)
    if folder is not None and not folder.exists():
        write_json(begun(root, command), inputs)


def ended_unrecorded(root: Path, command: list[str], inputs: dict[str, str]) -> bool:
    """Whether a step with these inputs made its folder, but was killed before it was recorded as finished."""
    folder, path = made(command), begun(root, command)
    return folder is not None and folder.exists() and path.exists() and read_json(path) == inputs


def inputs(root: Path, command: list[str]) -> dict[str, str]:
    """Digests of the files and folders that a step reads and that no earlier step wrote."""
    root, digests = root.resolve(), {}
    for word in called(command) if "headrace" in command else []:
        path = Path(word).resolve()
        if os.path.exists(word) and not path.is_relative_to(root):
            files = {word: sha256(path)} if path.is_file() else record(path)
            digests[word] = digest({name: of for name, of in files.items() if not (path / name).is_relative_to(root)})
    return digests


def run(command: list[str], listen: bool) -> tuple[int, str | None]:
    """(exit status, output if `listen`). If this process is interrupted, the step is terminated and waited for, as it
    may have results to save."""
    pipe, with_us = subprocess.PIPE if listen else None, partial(end_with_parent, os.getpid()) if POSIX else None
    with subprocess.Popen(command, stdout=pipe, text=True, preexec_fn=with_us) as step:
        try:
            printed, _ = step.communicate()
        except BaseException:
            step.terminate()
            raise  # after the step has ended
    return step.returncode, printed


def started_by(command: list[str]) -> list[str]:
    if command[0] == "headrace":
        return [*HEADRACE, *command[1:]]
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]} is not installed; expected it, or --scale laptop, which does not need it")
    return command
