"""The provenance of a folder of results: its plan, and the versions of the code that made its results. Results of
different versions are not mixed unless the user allows it.

made-by.json    all versions that worked in the folder, in order
"""

import hashlib
import json
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from .errors import InputError
from .integrity import read_json, sha256, write_json
from .processes import MADE_BY, is_free

SOURCES = (".py", ".yaml", ".so", ".dylib")
UNKNOWN = {"headrace": "of an unknown version"}  # for folders without made-by.json

Made = dict[str, str]  # {package: version}, and other properties that the results depend on


@lru_cache
def source() -> str:
    """Returns 12 hex digits of a SHA-256 of the package's files on the disk, including uncommitted changes."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in SOURCES):
        digest.update(f"{path.relative_to(package).as_posix()} {sha256(path)}\n".encode())
    return digest.hexdigest()[:12]


def running(**more: str) -> Made:
    """Returns the versions that run now. more: other properties that the results depend on."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"headrace": f"{__version__} (source {source()})", **packages, **more}


def record_versions(folder: Path, fresh: bool, accept_old: bool, **more: str) -> None:
    """Records the versions that run now in a folder, which must be locked.

    fresh: whether the folder has no results. Raises InputError if other versions made results, unless accept_old."""
    now, path = running(**more), folder / MADE_BY
    before = [] if fresh else read_json(path) if path.exists() else [UNKNOWN]
    if now in before:
        return
    if before and not accept_old:
        changed = [name for name in now if before[-1].get(name) != now[name]]
        there, here = (described({name: made.get(name, "unknown") for name in changed}) for made in (before[-1], now))
        raise InputError(
            f"{str(path)!r}: the results there were made by {there}; now runs {here}; name another --output, or add "
            "--accept-old to go on with both"
        )
    write_json(path, [*before, now])


def sentence(folder: Path) -> str:
    """Returns a sentence for a report that lists the versions that made a folder's results; "" for a single version."""
    path = folder / MADE_BY
    makers = read_json(path) if path.exists() else []
    several = "; ".join(map(described, makers))
    return f"Several versions made these results, one after another: {several}." if len(makers) > 1 else ""


def described(made: Made) -> str:
    """Returns "package version, …"."""
    return ", ".join(f"{name} {value}" for name, value in made.items())


def refuse_foreign(folder: Path, file: str = "plan.json") -> None:
    """Raises InputError for a folder with other files and without a plan."""
    if not (folder / file).exists() and not is_free(folder):
        raise InputError(f"{str(folder)!r} exists and is no folder of reports or runs; name another --output")


def claim(folder: Path, wanted: Any, accept_old: bool = False, file: str = "plan.json", **made: str) -> None:
    """Writes the plan `wanted` into a folder, or checks that the folder has the same plan, and records the versions.

    made: other properties that the results depend on. Raises InputError if the folder has another plan or other files,
    cannot be written or, without accept_old, has results of other versions."""
    path = folder / file
    if path.exists() and (held := read_json(path)) != wanted:
        where, there, here = difference(held, wanted)
        raise InputError(
            f"{str(folder)!r} holds another run ({where} is {there} there and {here} here); name another --output"
        )
    if fresh := not path.exists():
        refuse_foreign(folder, file)
    try:
        record_versions(folder, fresh, accept_old, **made)
        if fresh:
            write_json(path, wanted)
    except OSError as error:
        raise InputError(f"--output {str(folder)!r} cannot be written: {error.strerror}") from None


def difference(a: Any, b: Any, where: str = "the plan") -> tuple[str, str, str]:
    """Returns the first difference of two JSON values: (its name, the value in a, the value in b)."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next(difference(a[key], b[key], key) for key in a if a[key] != b[key])
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(difference(x, y, where) for x, y in zip(a, b, strict=True) if x != y)
    return where, short(a), short(b)


def short(value: Any, width: int = 60) -> str:
    """Returns a value as JSON, truncated to `width` characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= width else text[: width - 1] + "…"
