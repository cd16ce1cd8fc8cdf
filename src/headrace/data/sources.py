"""Reads documents from files or the Hub as a data set with the single column `text`."""

from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetNotFoundError

from ..utils.errors import InputError
from ..utils.integrity import sha256

READERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
TEXT = ("string", "large_string", "string_view")
PACKED = {".gz", ".zst", ".bz2", ".xz"}


def documents(sources: list[str], column: str) -> Dataset:
    """The documents of local files (a text file is one document; jsonl and parquet have one per row) or of one data set
    on the Hub, in the column "text".

    Raises:
        InputError: a source is missing or cannot be read, the files are of several kinds, or the column is missing, not
            text or null in a row.
    """
    files = [Path(source) for source in sources]
    if all(file.is_file() for file in files) and files:
        found = _local(files)
    elif len(sources) == 1 and not files[0].exists() and not files[0].suffix:
        found = _hub(sources[0])
    else:
        missing = next(source for source, file in zip(sources, files, strict=True) if not file.is_file())
        raise InputError(
            f"source {missing!r} is not a file; expected text, jsonl or parquet files, or one Hub data set"
        )
    if column not in found.column_names:
        raise InputError(f"--column {column!r} is not in the data; expected one of {', '.join(found.column_names)}")
    found = found.select_columns([column])
    kind = getattr(found.features[column], "dtype", found.features[column])
    if kind not in TEXT:
        raise InputError(f"--column {column!r} holds {kind}; expected text")
    if (texts := found.data.column(column)).null_count:
        first = texts.is_null().index(True).as_py() + 1
        raise InputError(f"document {first} of --column {column!r} is null; expected text")
    return found if column == "text" else found.rename_column(column, "text")


def _local(files: list[Path]) -> Dataset:
    kinds = {_reader(file) for file in files}
    if len(kinds) > 1:
        raise InputError(f"the sources mix {' and '.join(sorted(kinds))} files; expected one kind")
    kind = kinds.pop()
    options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
    try:
        return load_dataset(kind, data_files=[str(file) for file in files], split="train", **options)
    except Exception as error:  # datasets raises a class of its own around whatever a file does wrong
        raise InputError(f"the sources cannot be read as {kind}: {_cause(error)}") from error


def _reader(file: Path) -> str:
    suffixes = [s.lower() for s in file.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in READERS:
        raise InputError(f"source {str(file)!r} has an unknown suffix; expected a name ending in {', '.join(READERS)}")
    return READERS[suffixes[-1]]


def _hub(source: str) -> Dataset:
    """A data set of the Hub: `owner/name` or `owner/name:configuration`."""
    name, _, configuration = source.partition(":")
    try:
        return load_dataset(name, configuration or None, split="train")
    except (DatasetNotFoundError, ConnectionError, OSError, ValueError) as error:
        raise InputError(
            f"source {source!r} is neither a file nor a data set that can be loaded from the Hub: {_cause(error)}"
        ) from error


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fingerprint(sources: list[str]) -> list[dict[str, Any]]:
    """Name, size in bytes and SHA-256 of every file; the name alone for a data set of the Hub."""
    return [
        {"name": Path(source).name, "bytes": Path(source).stat().st_size, "sha256": sha256(Path(source))}
        if Path(source).is_file()
        else {"name": source}
        for source in sources
    ]
