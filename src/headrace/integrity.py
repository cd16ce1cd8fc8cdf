"""What files held when they were written, and what has become of them."""

import hashlib
from pathlib import Path
from typing import Any

PIECE = 1 << 20

Recorded = dict[str, Any]  # {a file's name: {"bytes", "sha256"}, or its bytes alone as it was once}


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def record(folder: Path) -> Recorded:
    """Size and SHA-256 of every file in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }


def damage(folder: Path, recorded: Recorded) -> str | None:
    """What is wrong with the first file that is not as it was recorded, in words; None: all of them are."""
    for name, wanted in recorded.items():
        file = folder / name
        size, digest = (wanted, None) if isinstance(wanted, int) else (wanted["bytes"], wanted["sha256"])
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            return f"{name} has {there} bytes, not {size}"
        if digest is not None and sha256(file) != digest:
            return f"{name} has another SHA-256 than when it was written"
    return None
