"""IPython extension: the cell magic %%sh of the pages that run commands."""

import os
import subprocess
from typing import Any

COLOURS = {"FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"}  # which Jupyter sets for its own display


def sh(line: str, cell: str) -> None:
    """Runs commands and shows their output in one piece. Raises CalledProcessError if one of them fails."""
    plain = {name: value for name, value in os.environ.items() if name not in COLOURS}
    done = subprocess.run(["bash", "-e", "-c", cell], env=plain | {"COLUMNS": "90"}, capture_output=True, text=True)
    print(done.stdout if done.returncode == 0 else done.stderr)
    done.check_returncode()


def load_ipython_extension(ipython: Any) -> None:
    ipython.register_magic_function(sh, "cell")
