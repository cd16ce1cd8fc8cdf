"""Checkpoints on what the papers evaluate on, by lm-evaluation-harness."""

from importlib.util import find_spec
from pathlib import Path

from ..utils.errors import InputError
from ..utils.extras import require_packages

SUITES = ("language", "recall", "needle", "blimp")
UNKNOWN = f"--suite={{!r}}; expected {', '.join(SUITES)}, or a task of lm-evaluation-harness"


def check_suites(text: str) -> None:
    """Raises InputError for a name that is in none of the harness's files: before the Hub is asked, and before the
    harness reads all of them, which take seconds."""
    require_packages("headrace eval", "lm_eval")
    tasks = Path(find_spec("lm_eval").origin).parent / "tasks"  # type: ignore
    for name in text.split(","):
        known = (name.strip().encode() in file.read_bytes() for file in tasks.rglob("*.yaml"))
        if name.strip() not in SUITES and not any(known):
            raise InputError(UNKNOWN.format(name.strip()))
