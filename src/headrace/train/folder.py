"""The report folder: who it belongs to, and files that are whole or absent.

plan.json                        what is compared; the folder serves no other study
arms/<arm>/result.json           one finished arm
results.json, report.html, *.png the report
"""

import json
from pathlib import Path
from typing import Any

from .. import provenance
from ..errors import InputError
from ..integrity import read_json, write_json
from ..processes import is_free
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


def refuse_foreign(folder: Path, file: str = "plan.json") -> None:
    if not (folder / file).exists() and not is_free(folder):
        raise InputError(f"{str(folder)!r} exists and is no folder of reports or runs; name another --output")


def own(folder: Path, wanted: Any, accept_old: bool = False, file: str = "plan.json", **made: str) -> None:
    """Make the folder a plan's own, which the file keeps. InputError where it holds another plan, something else or,
    without accept_old, what other versions made (made: see `provenance`), and where it cannot be written."""
    path = folder / file
    if path.exists() and (held := read_json(path)) != wanted:
        where, there, here = difference(held, wanted)
        raise InputError(
            f"{str(folder)!r} holds another run ({where} is {there} there and {here} here); name another --output"
        )
    if fresh := not path.exists():
        refuse_foreign(folder, file)
    try:
        provenance.claim(folder, fresh, accept_old, **made)
        if fresh:
            write_json(path, wanted)
    except OSError as error:
        raise InputError(f"--output {str(folder)!r} cannot be written: {error.strerror}") from None


def difference(a: Any, b: Any, where: str = "the plan") -> tuple[str, str, str]:
    """The first place where two JSON values differ: (its name, the value in a, the value in b)."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next(difference(a[key], b[key], key) for key in a if a[key] != b[key])
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(difference(x, y, where) for x, y in zip(a, b, strict=True) if x != y)
    return where, short(a), short(b)


def short(value: Any, width: int = 60) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= width else text[: width - 1] + "…"


def result_path(folder: Path, arm: Arm) -> Path:
    return folder / "arms" / arm.slug / "result.json"
