"""Files that are whole or absent, what they held when they were written, and what has become of them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .errors import InputError

CHECKSUMS = "checksums.json"  # beside a model's weights; its other files are there to be edited

Recorded = dict[str, Any]  # {a file's name: {"bytes", "sha256"}, or its bytes alone as it was once}


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


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record(folder: Path, pattern: str = "**/*") -> Recorded:
    """Size and SHA-256 of every file in a folder, or of those that a pattern fits."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files
    }


def digest(value: Any) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def damage(folder: Path, recorded: Recorded) -> str | None:
    """What is wrong with the first file that is not as it was recorded, in words; None: all of them are."""
    for name, wanted in recorded.items():
        file = folder / name
        size, content = (wanted, None) if isinstance(wanted, int) else (wanted["bytes"], wanted["sha256"])
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            return f"{name} has {there} bytes, not {size}"
        if content is not None and sha256(file) != content:
            return f"{name} has another SHA-256 than when it was written"
    return None


def seal(folder: Path) -> None:
    """Keep the checksums of a model's weights beside them."""
    write_json(folder / CHECKSUMS, record(folder, "*.safetensors"))


def unseal(folder: Path) -> None:
    """Before weights are written anew."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def check_weights(folder: Path) -> None:
    """InputError where a model's weights are not those that were sealed. A folder without checksums passes."""
    if not (folder / CHECKSUMS).is_file():
        return
    if wrong := damage(folder, read_json(folder / CHECKSUMS)):
        raise InputError(
            f"checkpoint {str(folder)!r} is damaged: {wrong}; delete {CHECKSUMS} if it was changed on purpose"
        )
