"""What a folder of results belongs to: one plan, and the versions of the code that worked on it. Results of one version
are not taken for another's.

made-by.json    every version that worked in the folder, in order
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
UNKNOWN = {"headrace": "of an unknown version"}  # of a folder from before this was recorded

Made = dict[str, str]  # {a package: its version}, and what else decides the results


@lru_cache
def source() -> str:
    """A digest of the package as it is on the disk, so that uncommitted edits count: 12 hex digits of a SHA-256."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in SOURCES):
        digest.update(f"{path.relative_to(package).as_posix()} {sha256(path)}\n".encode())
    return digest.hexdigest()[:12]


def running(**more: str) -> Made:
    """What runs now. more: what else a result of this kind depends on."""
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"headrace": f"{__version__} (source {source()})", **packages, **more}


def claim(folder: Path, fresh: bool, accept_old: bool, **more: str) -> None:
    """Record that what runs now works in a folder, which is locked. fresh: it holds no result.

    InputError where something else made what it holds, without accept_old."""
    now, path = running(**more), folder / MADE_BY
    before = [] if fresh else read_json(path) if path.exists() else [UNKNOWN]
    if now in before:
        return
    if before and not accept_old:
        changed = [name for name in now if before[-1].get(name) != now[name]]
        there, here = (told({name: made.get(name, "unknown") for name in changed}) for made in (before[-1], now))
        raise InputError(
            f"{str(path)!r}: the results there were made by {there}; now runs {here}; name another --output, or add "
            "--accept-old to go on with both"
        )
    write_json(path, [*before, now])


def sentence(folder: Path) -> str:
    """For a report: which versions made the results of a folder, where they are several; else nothing."""
    path = folder / MADE_BY
    makers = read_json(path) if path.exists() else []
    several = "; ".join(map(told, makers))
    return f"Several versions made these results, one after another: {several}." if len(makers) > 1 else ""


def told(made: Made) -> str:
    return ", ".join(f"{name} {value}" for name, value in made.items())


def refuse_foreign(folder: Path, file: str = "plan.json") -> None:
    if not (folder / file).exists() and not is_free(folder):
        raise InputError(f"{str(folder)!r} exists and is no folder of reports or runs; name another --output")


def own(folder: Path, wanted: Any, accept_old: bool = False, file: str = "plan.json", **made: str) -> None:
    """Make the folder a plan's own, which the file keeps. InputError where it holds another plan, something else or,
    without accept_old, what other versions made (made: see `claim`), and where it cannot be written."""
    path = folder / file
    if path.exists() and (held := read_json(path)) != wanted:
        where, there, here = difference(held, wanted)
        raise InputError(
            f"{str(folder)!r} holds another run ({where} is {there} there and {here} here); name another --output"
        )
    if fresh := not path.exists():
        refuse_foreign(folder, file)
    try:
        claim(folder, fresh, accept_old, **made)
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
