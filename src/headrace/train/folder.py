"""The report folder: who it belongs to, and files that are whole or absent.

plan.json                        what is compared; the folder serves no other study
arms/<arm>/result.json           one finished arm
results.json, report.html, *.png the report
"""

import json
import os
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..processes import is_free
from .plan import Arm, Study

NEEDED = {"mixer", "seed", "scores", "environment", "flops", "speeds"}  # of an arm's result


def write_json(path: Path, data: Any) -> None:
    """Write beside, flush to the disk, rename: a reader finds the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not JSON ({error}); delete it and run the command again") from None


def read_result(path: Path) -> dict[str, Any]:
    """What an arm left. InputError where the file is something else."""
    result = read_json(path)
    if not isinstance(result, dict) or not result.keys() >= NEEDED:
        raise InputError(f"{str(path)!r} is not the result of an arm; delete it and run the command again")
    return result


def claim(folder: Path, study: Study) -> None:
    """Make the folder this study's own. InputError where the study cannot be, and as `own` does."""
    check(folder, study)
    own(folder, study.to_json())


def check(folder: Path, study: Study) -> None:
    """InputError where the study cannot be, or not in this folder. Writes nothing."""
    for plan in study.plans:
        plan.check()
    refuse_foreign(folder)


def refuse_foreign(folder: Path) -> None:
    if not (folder / "plan.json").exists() and not is_free(folder):
        raise InputError(f"{str(folder)!r} exists and is no report folder; name another --output")


def own(folder: Path, wanted: Any) -> None:
    """Make the folder a plan's own. InputError where it holds another one, something else, or cannot be written."""
    path = folder / "plan.json"
    if path.exists():
        held = read_json(path)
        if held != wanted:
            where, there, here = difference(held, wanted)
            raise InputError(
                f"{str(folder)!r} holds another run ({where} is {there} there and {here} here); name another --output"
            )
        return
    refuse_foreign(folder)
    try:
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
