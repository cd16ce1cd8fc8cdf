"""IPython extension: the cell magic %%sh of the pages that run commands."""

import os
import re
import shlex
import subprocess
from multiprocessing import current_process
from multiprocessing.connection import Client
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

COLOURS = {"FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"}  # which Jupyter sets for its own display
PROGRESS = re.compile(r"^\d+ of \d+ steps of all arms\n", re.MULTILINE)
SERVER = os.environ.get("HEADRACE_DOCS_COMMANDS")  # the address of forked_kernels.serve


def sh(line: str, cell: str) -> None:
    """Runs commands, one in each line, and shows their output in one piece, without lines of progress. Raises
    CalledProcessError if one fails."""
    plain = {name: value for name, value in os.environ.items() if name not in COLOURS}
    run, shown = (forked if SERVER else started), ""
    for command in cell.replace("\\\n", " ").splitlines():
        done = (run if command.startswith("headrace ") else started)(command, plain | {"COLUMNS": "90"})
        print(done.stderr if done.returncode else "", end="")
        done.check_returncode()
        shown += PROGRESS.sub("", done.stdout)
    print(shown)


def started(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-e", "-c", command], env=environment, capture_output=True, text=True)


def forked(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a process that has imported PyTorch and transformers, which takes longer than what these pages do."""
    words = shlex.split(command)
    with TemporaryDirectory() as folder, Client(SERVER, authkey=current_process().authkey) as server:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch(), err.touch()
        server.send((words, os.getcwd(), environment, str(out), str(err)))
        return subprocess.CompletedProcess(words, server.recv(), out.read_text("utf-8"), err.read_text("utf-8"))


def load_ipython_extension(ipython: Any) -> None:
    ipython.register_magic_function(sh, "cell")
