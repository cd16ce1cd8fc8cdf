"""Reads documents one by one from files or a data set of the Hub. Only JSON arrays and uncut texts are held whole."""

import codecs
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem

from ..files.checks import check_encoding
from ..utils.errors import InputError, require
from ..utils.extras import require_packages
from ..utils.integrity import digest, sha256, short
from .encoding import last_place
from .held_out import Row

READERS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
BY_NAME = ".md", ".py"  # suffixes of files of text that `datasets` does not read in a folder
ZSTD = "zstd"
PACKED = {".gz": "gzip", ".zst": ZSTD, ".bz2": "bz2", ".xz": "xz"}
BLOCK = 1 << 12  # bytes of a packed file that are unpacked together: they may be a thousand times as many
WINDOW = 1 << 20  # characters of a text file that are read together
PATTERN = ("*", "?", "[", "::")  # marks of a pattern of paths, or of a chain of file systems, of fsspec
ABOUT = ("readme", "license", "licence", "notice", "citation", "dataset_info", "metadata")  # names of what is no data
ROWS = 64  # rows of a Parquet file that are read together


class Sample(NamedTuple):
    """Which documents are read: of files in random order, each document with a probability."""

    share: float  # the probability
    seed: int

    def ordered(self, files: tuple[str, ...]) -> tuple[str, ...]:
        """The files in the random order."""
        return tuple(files[i] for i in self._generator(0).permutation(len(files)))

    def files_of(self, name: str, dataset: Any) -> Iterator[tuple[str, Any]]:
        """The files of a streamed data set in the random order, each with a name and its rows."""
        for i in self._generator(0).permutation(dataset.num_shards):
            yield f"{name} file {i + 1}", dataset.shard(dataset.num_shards, int(i))

    def kept(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows of the chosen documents. A row that is no document is chosen as one, so that the counts of bad rows
        are those of the sample."""
        draw, chosen, drawn, kept = self._generator(1).random, False, 0, 0
        for row in rows:
            if row.offset == 0:
                chosen, drawn = draw() < self.share, drawn + 1
            if chosen:
                kept += 1
                yield row
        require(kept or not drawn, f"--sample {self.share:g} keeps no document of the sources; expected a larger share")

    def _generator(self, of: int) -> np.random.Generator:
        """A stream of its own for each use, independent of that of the held-out documents, which has the same seed."""
        return np.random.default_rng([self.seed, 1 + of])


def rows(sources: tuple[str, ...], column: str, cut: bool, sample: Sample | None = None) -> Iterator[Row]:
    """The rows of local files (a text file is one document; jsonl and Parquet have one per row) or of one data set: a
    folder or a name on the Hub.

    Args:
        column: name of the column of the text.
        cut: whether a text file may come in several rows, cut at `encoding.PLACES`.
        sample: which documents to read; None: all, in order.

    Raises:
        InputError: a source is missing or cannot be read, or the files are of several kinds.
    """
    if sample is None:
        return _read(sources, column, cut, None)
    return sample.kept(_read(sample.ordered(sources), column, cut, sample))


def text_of(source: Path | str) -> str:
    """The text of a file, whose documents are joined by newlines. InputError for a file without text."""
    texts = [row.text for row in rows((str(source),), "text", cut=False) if not row.bad]
    require(bool(texts), f"source {str(source)!r} has no text")
    return "\n".join(texts)


def _read(sources: tuple[str, ...], column: str, cut: bool, sample: Sample | None) -> Iterator[Row]:
    """The rows of the sources in order; with a sample, the files of a data set are in its order."""
    read = _reader(sources, column, cut, sample)
    for source in sources:
        try:
            yield from read(source)
        except InputError:
            raise
        except Exception as error:  # each library that reads raises classes of its own
            cure = "; expected its files by name, of which invalid rows are left out" * Path(source).is_dir()
            raise InputError(f"source {source!r} cannot be read: {_cause(error)}{cure}") from error


def _reader(sources: tuple[str, ...], column: str, cut: bool, sample: Sample | None) -> Callable[[str], Iterator[Row]]:
    files = [Path(source) for source in sources]
    named = [f for f in files if not f.exists() and (":" in f.name or not f.suffix or f.suffix[1:2].isdigit())]  # -1.0
    if len(files) == 1 and (files[0].is_dir() or named):
        return partial(_data_set, column=column, sample=sample)
    if missing := [source for source, file in zip(sources, files, strict=True) if not file.is_file()]:
        raise InputError(f"source {missing[0]!r} is not a file; expected text, jsonl or Parquet files, or one data set")
    last = {file.resolve(): i for i, file in enumerate(files)}
    if again := {*range(len(files))} - {*last.values()}:
        raise InputError(f"source {sources[min(again)]!r} is given twice; expected each file once")
    kinds = {_kind(file) for file in files}
    require(len(kinds) <= 1, f"the sources mix {' and '.join(sorted(kinds))} files; expected one kind")
    if kinds != {"text"}:
        return partial(_json if kinds == {"json"} else _parquet, column=column)
    require(column == "text", f"--column {column!r} with {sources[0]!r}, a text without columns; expected it left out")
    return partial(_text, cut=cut)


def _kind(file: Path) -> str:
    suffixes = [s.lower() for s in file.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in READERS:
        raise InputError(f"source {str(file)!r} has an unknown suffix; expected a name ending in {', '.join(READERS)}")
    return READERS[suffixes[-1]]


@contextmanager
def _open(source: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file of text, unpacked and without a byte order mark."""
    path, packed = Path(source).resolve(), PACKED.get(Path(source).suffix.lower())
    # OpenFile takes the path as it is; fsspec.open would read *, ?, [ and :: in it as a pattern or a chain of systems.
    with OpenFile(LocalFileSystem(), str(path), compression=None if packed == ZSTD else packed) as opened:
        file = io.BufferedReader(Unpacked(opened) if packed == ZSTD else opened)
        check_encoding(file.peek(4), f"source {source!r}")
        if file.peek(4).startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        yield file


class Unpacked(io.RawIOBase):
    """What a file in the format of Zstandard holds. `zstandard`'s own reader takes the end of a file that was cut off
    for that of its text."""

    def __init__(self, packed: Any):
        self.parts, self.held, self.passed = _frames(packed), memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.held and (part := next(self.parts, None)) is not None:
            self.held = memoryview(part)
        size = min(len(buffer), len(self.held))
        buffer[:size], self.held, self.passed = self.held[:size], self.held[size:], self.passed + size
        return size

    def tell(self) -> int:
        return self.passed


def _frames(packed: Any) -> Iterator[bytes]:
    require_packages("reading .zst files", "zstandard", extra="train")
    from zstandard import ZstdDecompressor

    frame = None
    while data := packed.read(BLOCK):
        while data:
            frame = frame or ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data, frame = frame.unused_data, None if frame.eof else frame
    if frame is not None:
        raise EOFError("Compressed file ended before the end of its last frame")


def _text(source: str, cut: bool) -> Iterator[Row]:
    name, offset, held = Path(source).name, 0, ""
    with _open(source) as opened:
        file = io.TextIOWrapper(opened, "utf-8")
        while new := _characters(file, WINDOW if cut else -1):
            text, begin = held + new, max(len(held) - 2, 0)  # a place needs two characters
            if at := last_place(text, begin) if cut else 0:
                size = len(text[:at].encode())
                yield Row(name, 1, text[:at], size, offset, ends=False)
                offset += size
            held = text[at:]
    if held:
        yield Row(name, 1, held, len(held.encode()), offset)
    else:
        yield Row(name, 1, bad="empty")


def _characters(file: Any, number: int) -> str:
    """The next characters of a file of text. ValueError with the place in the file of a byte that is not UTF-8."""
    try:
        return file.read(number)
    except UnicodeDecodeError as error:  # whose own place is in the block that was decoded
        byte, place = error.object[error.start], file.buffer.tell() - len(error.object) + error.start
        raise ValueError(f"'utf-8' codec can't decode byte 0x{byte:02x} in position {place}: {error.reason}") from None


def _json(source: str, column: str) -> Iterator[Row]:
    name = Path(source).name
    with _open(source) as file:
        lines: Iterable[bytes] = file
        if file.peek(1).lstrip()[:1] == b"[":
            if (array := _array(whole := file.read())) is not None:
                yield from (_of_record(name, number, item, column) for number, item in enumerate(array, 1))
                return
            lines = whole.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                item = json.loads(line.decode())
            except UnicodeDecodeError:
                yield Row(name, number, bad="not UTF-8")
            except (ValueError, RecursionError):
                yield Row(name, number, bad="not JSON" if line.strip() else "empty")
            else:
                yield _of_record(name, number, item, column)


def _array(whole: bytes) -> list[Any] | None:
    """The items of a file that is one JSON array; None for lines of which the first is an array."""
    try:
        return json.loads(whole)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return None


def _of_record(name: str, number: int, item: Any, column: str) -> Row:
    if not isinstance(item, dict):
        return Row(name, number, bad="no JSON object")
    if column not in item:
        return Row(name, number, short(list(item)), bad=f"without a column {column!r}")
    return _of_value(name, number, item[column])


def _of_value(name: str, number: int, value: Any) -> Row:
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            return Row(name, number, bad="null" if text is None else f"of type {type(text).__name__}, not text")
        return Row(name, number, text, len(text.encode())) if text else Row(name, number, bad="empty")
    except UnicodeError:  # also a half of a character of two, which JSON can write
        return Row(name, number, bad="not UTF-8")


def _parquet(source: str, column: str) -> Iterator[Row]:
    require_packages("reading Parquet files", "datasets", extra="train")  # which brings pyarrow
    import pyarrow as pa
    import pyarrow.parquet

    name = Path(source).name
    with pa.parquet.ParquetFile(source) as file:
        if column not in file.schema_arrow.names:
            raise InputError(
                f"--column {column!r} is not in {source!r}; expected one of {', '.join(file.schema_arrow.names)}"
            )
        kind = file.schema_arrow.field(column).type
        text = kind.value_type if pa.types.is_dictionary(kind) else kind
        kinds = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view
        if not any(is_text(text) for is_text in kinds):
            raise InputError(f"--column {column!r} of {source!r} holds {kind}; expected text")
        number = 0
        for batch in file.iter_batches(ROWS, columns=[column], use_threads=False):
            for value in batch.column(0).cast(pa.large_binary()).to_pylist():
                number += 1
                yield _of_value(name, number, value)


def _data_set(source: str, column: str, sample: Sample | None) -> Iterator[Row]:
    """Of a folder, or of the Hub: `owner/name` or `owner/name:configuration`."""
    local = Path(source).is_dir()
    # `datasets` takes the last part of the name of a folder, which "." does not have.
    name, _, configuration = (str(Path(source).resolve()), "", "") if local else source.partition(":")
    if local and (odd := next((mark for mark in PATTERN if mark in name), None)):
        raise InputError(
            f"source {source!r} is a folder whose path has {odd!r}, which `datasets` reads as a pattern; expected its "
            "files by name, or a folder of another name"
        )
    if local and (suffixes := {file.suffix for file in _files(Path(source))}) and suffixes <= {*BY_NAME}:
        unread = min(suffixes)
        raise InputError(
            f"source {source!r} is a folder of {unread} files; expected them by name, as in {source}/*{unread}"
        )
    require_packages("reading data sets", "datasets", extra="train")
    from datasets import load_dataset

    load: Any = partial(load_dataset, name, configuration or None, split="train", streaming=True)
    try:
        dataset = load()
    except ValueError as error:
        told = f"source {source!r} has no split train, which the names of files tell ({error})"
        require("Bad split" not in str(error), f"{told}; expected one, or files by name")
        raise
    if local and (other := _other(Path(source), dataset.info.builder_name)):
        kind = dataset.info.builder_name
        raise InputError(f"source {source!r} mixes {kind} files and {other.name!r}; expected a folder of one kind")
    if local:
        _note_left_out(Path(source))
    if dataset.info.builder_name == "text":  # whose rows are lines, without their ends
        dataset = load(sample_by="document")
    for place, items in [(source, dataset)] if sample is None else sample.files_of(source, dataset):
        yield from (_of_record(place, number, item, column) for number, item in enumerate(items, 1))


@cache
def _note_left_out(folder: Path) -> None:
    """Says, once, which files `datasets` leaves out, as their names are of another split than train (test.txt)."""
    from datasets import load_dataset_builder

    found = load_dataset_builder(str(folder.resolve())).config.data_files or {}
    read = {Path(file) for file in found.get("train", ())}
    known = {*READERS, *PACKED} - {*BY_NAME}
    if left := [f.name for f in _files(folder.resolve()) if f.suffix in known and f not in read]:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        print(
            f"Note: of folder {str(folder)!r} the files of the split train are read. Left out by their names: "
            f"{', '.join(left[:3])}{more}. Give files by name to read them", file=sys.stderr,
        )  # fmt: skip


def _other(folder: Path, kind: str) -> Path | None:
    """A file of text of another kind than those that `datasets` has found in a folder, of which it takes one kind."""
    wrong = {suffix for suffix, its_kind in READERS.items() if its_kind != kind} - {*BY_NAME}
    wrong |= {".md"} if kind == "text" else set()  # else it is about the data
    return next((file for file in _files(folder) if file.suffix in wrong), None)


def _files(folder: Path) -> Iterator[Path]:
    """The files of a folder, without hidden ones and those that are about the data."""
    files = {file: file.relative_to(folder).parts for file in sorted(folder.rglob("*")) if file.is_file()}
    seen = (file for file, parts in files.items() if not any(part.startswith(".") for part in parts))
    return (file for file in seen if not file.name.lower().startswith(ABOUT))


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fingerprint(source: str) -> dict[str, Any]:
    """Name, size in bytes and SHA-256 of a file; name and a digest of the files of a folder; the name alone for a data
    set of the Hub."""
    if (path := Path(source)).is_file():
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
    if not path.is_dir():
        return {"name": source}
    inside = {file.relative_to(path): file for file in path.rglob("*") if file.is_file()}
    shown = {name.as_posix(): sha256(file) for name, file in inside.items() if not any(p[0] == "." for p in name.parts)}
    return {"name": source, "sha256": digest(shown)}
