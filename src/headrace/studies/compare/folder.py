"""The folder of a study.

plan.json                        the study as data; the folder is for this study only
arms/<arm>/result.json           the result of a finished arm
results.json, report.html, *.png the report
"""

from pathlib import Path
from typing import Any

from ...utils import integrity
from ...utils.errors import InputError
from ...utils.provenance import refuse_foreign
from .plan import Arm, Study

NEEDED = {"mixer", "seed", "scores", "environment", "flops", "speeds"}  # required keys of an arm's result


def read_result(path: Path) -> dict[str, Any]:
    """The result of an arm. InputError if the file is not a result."""
    result = integrity.read_result(path)
    if not result.keys() >= NEEDED:
        raise InputError(f"{str(path)!r} is not the result of an arm; delete it and run the command again")
    return result


def check(folder: Path, study: Study) -> None:
    """InputError if the study is invalid, or if the folder holds files of something else. Writes nothing."""
    for plan in study.plans:
        plan.check()
    refuse_foreign(folder)


def result_path(folder: Path, arm: Arm) -> Path:
    return folder / "arms" / arm.slug / "result.json"
