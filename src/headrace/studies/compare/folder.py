"""The folder of a comparison.

plan.json                        what is compared; the folder serves no other study
arms/<arm>/result.json           one finished arm
results.json, report.html, *.png the report
"""

from pathlib import Path
from typing import Any

from ...utils.errors import InputError
from ...utils.integrity import read_json
from ...utils.provenance import own, refuse_foreign
from .plan import Arm, Study

NEEDED = {"mixer", "seed", "scores", "environment", "flops", "speeds"}  # of an arm's result


def read_result(path: Path) -> dict[str, Any]:
    """What an arm left. InputError where the file is something else."""
    result = read_json(path)
    if not isinstance(result, dict) or not result.keys() >= NEEDED:
        raise InputError(f"{str(path)!r} is not the result of an arm; delete it and run the command again")
    return result


def claim(folder: Path, study: Study, accept_old: bool = False) -> None:
    """Make the folder this study's own. InputError where the study cannot be, and as `own` does."""
    check(folder, study)
    own(folder, study.to_json(), accept_old)


def check(folder: Path, study: Study) -> None:
    """InputError where the study cannot be, or not in this folder. Writes nothing."""
    for plan in study.plans:
        plan.check()
    refuse_foreign(folder)


def result_path(folder: Path, arm: Arm) -> Path:
    return folder / "arms" / arm.slug / "result.json"
