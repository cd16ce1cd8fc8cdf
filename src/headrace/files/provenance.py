"""The provenance of a folder of results: its plan, and the versions of the code that made its results. To continue the
results of another version gives a warning, and every report names all versions.

made-by.json    all versions that worked in the folder, in order
"""

import hashlib
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import headrace

from ..utils.errors import InputError, VersionWarning
from ..utils.integrity import sha256, short, write_json
from ..utils.plugins import digests
from .checks import read_json
from .processes import MADE_BY, is_free

SOURCES = (".py", ".yaml", ".json", ".csv", ".so", ".dylib")
UNKNOWN = {"headrace": "of an unknown version"}  # for folders without made-by.json

ABSENT = "missing"  # in place of the value of a field that a plan lacks

Place = tuple[str | int, ...]  # names and indices that lead to a part of a JSON value
Versions = dict[str, str]  # {package: version}, and other properties that the results depend on
MADE = [{...: str}]  # the form of made-by.json


@lru_cache
def source() -> str:
    """Returns 12 hex digits of a SHA-256 of the package's files on the disk, including uncommitted changes."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in SOURCES):
        digest.update(f"{path.relative_to(package).as_posix()} {sha256(path)}\n".encode())
    return digest.hexdigest()[:12]


def running(**more: str) -> Versions:
    """Returns the versions that run now. more: other properties that the results depend on."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"headrace": f"{headrace.__version__} (source {source()})", **packages, **digests(), **more}


def record_versions(folder: Path, fresh: bool, **more: str) -> None:
    """Records the versions that run now in a folder, which must be locked.

    fresh: whether the folder has no results. Warns if other versions made results."""
    current, path = running(**more), folder / MADE_BY
    before = [] if fresh else read_json(path, MADE) if path.exists() else [UNKNOWN]
    if current in before:
        return
    if before:
        changed = [name for name in current | before[-1] if before[-1].get(name) != current.get(name)]
        old, new = (described({name: v.get(name, "unknown") for name in changed}) for v in (before[-1], current))
        sentence = f"{str(path)!r}: the results there were made by {old}; now runs {new}, and the report will name both"
        warnings.warn(sentence, VersionWarning, stacklevel=4)
    write_json(path, [*before, current])


def sentence(folder: Path) -> str:
    """Returns a sentence for a report that lists the versions that made a folder's results; "" for a single version."""
    path = folder / MADE_BY
    makers = read_json(path, MADE) if path.exists() else []
    several = "; ".join(map(described, makers))
    return f"Several versions made these results, one after another: {several}." if len(makers) > 1 else ""


def described(versions: Versions) -> str:
    """Returns "package version, …"."""
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def refuse_foreign(folder: Path, file: str = "plan.json") -> None:
    """Raises InputError for a folder with other files and without a plan."""
    if not (folder / file).exists() and not is_free(folder):
        raise InputError(f"{str(folder)!r} exists and is no folder of reports or runs; name another --output")


def release(folder: Path, file: str = "plan.json") -> None:
    """Deletes the plan and the versions in a folder that has nothing else."""
    if is_free(folder, file):
        for name in (file, MADE_BY):
            (folder / name).unlink(missing_ok=True)


def claim(folder: Path, plan: Any, file: str = "plan.json", optional: Iterable[Place] = (), **made: str) -> None:
    """Writes a plan into a folder, or checks that the folder has the same plan, and records the versions.

    Args:
        optional: places of `plan` that the folder's plan may lack, as one of an older version does: see `defaults`.
        made: other properties that the results depend on.

    Raises:
        InputError: the folder has another plan or other files, or cannot be written.
    """
    path = folder / file
    if path.exists() and (changed := difference(read_json(path), plan, optional=set(optional))):
        name, before, now = changed
        raise InputError(
            f"{str(folder)!r} holds another run ({name} is {before} there and {now} here); name another --output"
        )
    if fresh := not path.exists():
        refuse_foreign(folder, file)
    try:
        record_versions(folder, fresh, **made)
        if fresh:
            write_json(path, plan)
    except OSError as error:
        raise InputError(f"--output {str(folder)!r} cannot be written: {error.strerror}") from None


def defaults(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yields the places of the fields that have their default, in a value of dataclasses, dicts and sequences. A plan
    that lacks such a field is of a version without it, and says the same."""
    if is_dataclass(value):
        for field in fields(value):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if default is not MISSING and getattr(value, field.name) == default:
                yield (*at, field.name)
        parts: Iterable[tuple[Any, Any]] = ((field.name, getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, dict):
        parts = value.items()
    else:
        parts = enumerate(value) if isinstance(value, list | tuple) else ()
    for name, part in parts:
        yield from defaults(part, (*at, name))


def difference(
    held: Any, current: Any, optional: Collection[Place] = (), at: Place = ()
) -> tuple[str, str, str] | None:
    """Returns the first difference of two JSON values: (its name, the value in held, the value in current), or None.

    Args:
        optional: places of `current` that `held` may lack.
        at: the place of the two values.
    """
    if isinstance(held, dict) and isinstance(current, dict):
        names = [name for name in held | current if name in held or (*at, name) not in optional]
        pairs = ((name, held.get(name, ABSENT), current.get(name, ABSENT)) for name in names)
    elif isinstance(held, list) and isinstance(current, list) and len(held) == len(current):
        pairs = ((i, *both) for i, both in enumerate(zip(held, current, strict=True)))
    elif held == current:
        return None
    else:
        name = next((part for part in reversed(at) if isinstance(part, str)), "the plan")
        before, now = (value if value is ABSENT else short(value) for value in (held, current))
        return name, before, now
    return next(filter(None, (difference(a, b, optional, (*at, name)) for name, a, b in pairs)), None)
