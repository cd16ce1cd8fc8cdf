"""The steps one after the other. What has ended well is not done again: done/<step>.json says that it has."""

import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...utils import provenance
from ...utils.errors import InputError
from ...utils.integrity import digest, read_json, record, sha256, write_json
from ...utils.processes import end_with_parent
from .experiment import called

RESUMED = ("compare", "train", "bench", "eval")  # commands that go on with what is in a folder
HEADRACE = [sys.executable, "-c", "from headrace.cli import main; main()"]


def downloads(steps: list[list[str]]) -> str:
    """A sentence: what they take from the internet. InputError where a file or folder that they read is not there."""
    found: dict[str, None] = {}
    for name, *arguments in map(called, steps):
        options = dict(itertools.pairwise(arguments))
        texts = itertools.takewhile(lambda argument: not argument.startswith("--"), arguments)
        if name in ("prepare", "compare"):
            named = [*texts, *([options["--tokenizer"]] if "--tokenizer" in options else [])]
            found |= {one: None for one in named if not is_local(one)}
        elif name == "eval" and "--data" not in options:
            found[f"the rows of {options['--suite']}"] = None
        elif name == "eval" and not Path(options["--data"]).is_dir():
            raise InputError(f"--data={options['--data']!r}; expected a folder")
    if not found:
        return "Nothing comes from the internet."
    return f"From the internet: {', '.join(found)}. Local files take their place: --text FILE …, --data FOLDER."


def is_local(name: str) -> bool:
    if not Path(name).exists() and Path(name).suffix:
        raise InputError(f"{name!r} is not a file; name with --text what is trained on")
    return Path(name).exists()


def mark(root: Path, command: list[str]) -> Path:
    return root / "done" / f"{hashlib.sha256(shlex.join(command).encode()).hexdigest()[:16]}.json"


def done(root: Path, command: list[str]) -> dict[str, Any] | None:
    """What is kept of a step: its seconds, and what it printed where that is JSON; None where it is to be done."""
    path = mark(root, command)
    return read_json(path) if path.exists() else None


def execute(steps: list[list[str]], root: Path, tell: Callable[[str], None], accept_old: bool = False) -> None:
    """Raises InputError where a step fails, whose predecessors are kept, and where what is kept was made by another
    version, without accept_old, or of other inputs."""
    provenance.claim(root, not (root / "done").exists(), accept_old)
    for i, command in enumerate(steps, 1):
        said, given = f"step {i} of {len(steps)}: {shlex.join(command)}", inputs(root, command)
        if (kept := done(root, command)) is not None:
            before = kept.get("inputs", given)
            if changed := [name for name, content in given.items() if before.get(name) != content]:
                raise InputError(
                    f"{str(mark(root, command))!r} is of step {i} with {changed[0]!r} as it was before; name another "
                    "--output"
                )
            tell(f"{said}: done before")
            continue
        tell(said)
        started = time.monotonic()
        code, printed = run(started_by(command, accept_old), "--json" in command)
        if code:
            raise InputError(f"step {i} ended with {code}: {shlex.join(command)}")
        seconds = round(time.monotonic() - started, 1)
        write_json(
            mark(root, command),
            {"command": shlex.join(command), "seconds": seconds, "said": printed, "inputs": given},
        )


def inputs(root: Path, command: list[str]) -> dict[str, str]:
    """Digests of the files, and of those in folders, that a step reads and no step before it wrote."""
    made, found = root.resolve(), {}
    for word in called(command) if "headrace" in command else []:
        path = Path(word).resolve()
        if os.path.exists(word) and not path.is_relative_to(made):
            files = {word: sha256(path)} if path.is_file() else record(path)
            found[word] = digest({name: of for name, of in files.items() if not (path / name).is_relative_to(made)})
    return found


def run(command: list[str], listen: bool) -> tuple[int, str | None]:
    """(exit code, what it printed where somebody listens). A step ends with us, and is waited for: it may have
    something to keep."""
    pipe, with_us = subprocess.PIPE if listen else None, partial(end_with_parent, os.getpid())
    with subprocess.Popen(command, stdout=pipe, text=True, preexec_fn=with_us) as step:
        try:
            printed, _ = step.communicate()
        except BaseException:
            step.terminate()
            raise  # after the step has ended
    return step.returncode, printed


def started_by(command: list[str], accept_old: bool = False) -> list[str]:
    if accept_old and "headrace" in command and called(command)[0] in RESUMED:
        command = [*command, "--accept-old"]
    if command[0] == "headrace":
        return [*HEADRACE, *command[1:]]
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]} is not installed; the steps of --scale laptop do without it")
    return command
