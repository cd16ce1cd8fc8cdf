"""Files of results: records with numbers that JSON does not have, and with a checksum of their content."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from os.path import abspath
from pathlib import Path
from typing import Any

from ..files.checks import SUM, Form, misfit, read_json
from ..utils.errors import require
from ..utils.integrity import digest, write_json

AGAIN = "; delete it and run the command again"  # which makes a result anew
NOT_FINITE = "not_finite"  # key of a record: {JSON pointer (RFC 6901) of a null: the number "nan", "inf" or "-inf"}


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

    nullable = _changed(data, nulled)
    return nullable | {NOT_FINITE: nullable.get(NOT_FINITE, {}) | marks} if marks else nullable


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


def read_result(path: Path, form: dict[Any, Form] | None = None) -> dict[str, Any]:
    """Returns a record written by `write_result`, with its numbers that are not finite. A record without a checksum
    passes.

    Raises InputError if the file is not a JSON object of the form, or if its content has changed."""
    data = read_json(path, cure=AGAIN)
    wrong = misfit(data, form or {})
    if wrong is None and data.pop(SUM, None) not in (None, digest(data)):
        wrong = "it has another SHA-256 than when it was written"
    require(wrong is None, f"{str(path)!r} is damaged: {wrong}{AGAIN}")
    return restored(data)


def short_names(paths: Sequence[str], kind: str) -> dict[str, str]:
    """Short name -> path. The short name is that of the folder or, for a folder called `model`, of its parent; if two
    are equal, the path takes their place. kind: of the folders, for the InputError if one is given twice."""
    places = [Path(abspath(path)) for path in paths]  # "model", "." and ".." have names there
    require(len({*places}) == len(paths), f"a {kind} is given twice; expected each {kind} once")
    shorts = [(place.parent if place.name == "model" else place).name for place in places]
    return {short if shorts.count(short) == 1 else path: path for short, path in zip(shorts, paths, strict=True)}


def file_names(names: Iterable[str], spell: Callable[[str], str]) -> dict[str, str]:
    """Name -> its spelling in file names. Names that are spelt alike get a digest, also those that differ in case."""
    spelt = {name: spell(name) for name in names}
    alike = Counter(spelling.lower() for spelling in spelt.values())
    return {name: s if alike[s.lower()] == 1 else f"{s}-{digest(name)[:8]}" for name, s in spelt.items()}
