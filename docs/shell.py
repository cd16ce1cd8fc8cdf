"""IPython extension: the cell magic %%sh of the pages that run commands."""

import os
import re
import subprocess
from typing import Any

COLOURS = {"FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"}  # which Jupyter sets for its own display
PROGRESS = re.compile(r"^\d+ of \d+ steps of all arms\n", re.MULTILINE)


def sh(line: str, cell: str) -> None:
    """Runs commands, one in each line, and shows their output in one piece, without lines of progress. Raises
    CalledProcessError if one fails."""
    plain = {name: value for name, value in os.environ.items() if name not in COLOURS}
    done = subprocess.run(["bash", "-e", "-c", cell], env=plain | {"COLUMNS": "90"}, capture_output=True, text=True)
    print(done.stderr if done.returncode else "", end="")
    done.check_returncode()
    print(PROGRESS.sub("", done.stdout))


def load_ipython_extension(ipython: Any) -> None:
    ipython.register_magic_function(sh, "cell")
