"""Atomic writes of files, numbers that JSON does not have, and checksums that show later changes of files."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import InputError

SUM = "sha256"  # key of the checksum of a result
NOT_FINITE = "not_finite"  # key of a record: {JSON pointer (RFC 6901) of a null: the number "nan", "inf" or "-inf"}
CHECKSUMS = "checksums.json"  # checksums of a model's weights; its other files may be edited

Recorded = dict[str, Any]  # {name of a file: {"bytes", "sha256"}, or in old records only the number of bytes}


def write_json(path: Path, data: Any) -> None:
    """Writes the file atomically: into a temporary file, which is flushed to the disk and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. Raises InputError if the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not JSON ({error}); delete it and run the command again") from None


def finite(data: Any) -> Any:
    """Returns a record (a dict), or a list of records, in the form of JSON: numbers that are not finite are null, and
    the record's key NOT_FINITE lists them."""
    if isinstance(data, list):
        return [finite(record) for record in data]
    marks: dict[str, str] = {}

    def nulled(where: str, value: Any) -> Any:
        if not isinstance(value, float) or math.isfinite(value):
            return value
        marks[where] = str(float(value))
        return None

    found = _changed(data, nulled)
    return found | {NOT_FINITE: found.get(NOT_FINITE, {}) | marks} if marks else found


def restored(data: Any) -> Any:
    """Returns what `finite` was given, with NaN and infinities in place of the nulls that are marked."""
    if isinstance(data, list):
        return [restored(record) for record in data]
    marks = data.get(NOT_FINITE, {})
    rest = {key: value for key, value in data.items() if key != NOT_FINITE}
    return _changed(rest, lambda where, value: float(marks[where]) if where in marks else value)


def _changed(value: Any, change: Callable[[str, Any], Any], where: str = "") -> Any:
    """Applies `change`, a function of JSON pointer and value, to every value that is neither a dict nor a list."""
    if isinstance(value, dict):
        places = {key: str(key).replace("~", "~0").replace("/", "~1") for key in value}
        return {key: _changed(item, change, f"{where}/{places[key]}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change, f"{where}/{i}") for i, item in enumerate(value)]
    return change(where, value)


def write_result(path: Path, data: dict[str, Any]) -> None:
    """Writes a record, in the form of `finite`, with the SHA-256 of its content, which `read_result` checks."""
    content = finite(data)
    write_json(path, content | {SUM: digest(json.loads(json.dumps(content)))})  # as it is read: keys are strings


def read_result(path: Path) -> dict[str, Any]:
    """Returns a record written by `write_result`, with its numbers that are not finite. A record without a checksum
    passes.

    Raises InputError if the file is not a JSON object, or if its content has changed."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise InputError(f"{str(path)!r} is not a JSON object; delete it and run the command again")
    if data.pop(SUM, None) not in (None, digest(data)):
        raise InputError(
            f"{str(path)!r} is damaged: it has another SHA-256 than when it was written; delete it and run the command "
            "again"
        )
    return restored(data)


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record(folder: Path, pattern: str = "**/*") -> Recorded:
    """Returns size and SHA-256 of the files in a folder that match a pattern."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }


def digest(value: Any) -> str:
    """Returns the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_names(names: Iterable[str], spell: Callable[[str], str]) -> dict[str, str]:
    """Name -> its spelling in file names. Names that are spelt alike get a digest, also those that differ in case."""
    spelt = {name: spell(name) for name in names}
    alike = Counter(spelling.lower() for spelling in spelt.values())
    return {name: s if alike[s.lower()] == 1 else f"{s}-{digest(name)[:8]}" for name, s in spelt.items()}


def damage(folder: Path, recorded: Recorded, contents: bool = True) -> str | None:
    """Returns a sentence about the first file that differs from its record, or None if no file does.

    contents: read the files and compare their SHA-256; False compares sizes only."""
    for name, wanted in recorded.items():
        file = folder / name
        size, content = (wanted, None) if isinstance(wanted, int) else (wanted["bytes"], wanted["sha256"])
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            return f"{name} has {there} bytes, not {size}"
        if contents and content is not None and sha256(file) != content:
            return f"{name} has another SHA-256 than when it was written"
    return None


def seal(folder: Path) -> None:
    """Writes the checksums of a model's weights into their folder."""
    write_json(folder / CHECKSUMS, record(folder, "*.safetensors"))


def unseal(folder: Path) -> None:
    """Deletes the checksums of a model's weights, before new weights are written."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def check_weights(folder: Path) -> None:
    """Raises InputError if a model's weights differ from their checksums. A folder without checksums passes."""
    if not (folder / CHECKSUMS).is_file():
        return
    if wrong := damage(folder, read_json(folder / CHECKSUMS)):
        raise InputError(
            f"checkpoint {str(folder)!r} is damaged: {wrong}; delete {CHECKSUMS} if it was changed on purpose"
        )
