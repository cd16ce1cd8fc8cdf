"""Atomic writes of files, and checksums that show later changes of them."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CHECKSUMS = "checksums.json"  # checksums of a model's weights; its other files may be edited
SHORT = 60

Recorded = dict[str, Any]  # {name of a file: {"bytes", "sha256"}, or in old records only the number of bytes}


@contextmanager
def atomic(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yields a temporary file, which is flushed to the disk and renamed to `path` at the end of the block, or deleted
    after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Writes the file atomically."""
    with atomic(path) as file:
        json.dump(data, file, indent=1, ensure_ascii=False, allow_nan=False)


def short(value: Any) -> str:
    """Returns a value as JSON, truncated to SHORT characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


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


def seal(folder: Path) -> None:
    """Writes the checksums of a model's weights into their folder."""
    write_json(folder / CHECKSUMS, record(folder, "*.safetensors"))
