"""Documents as columns, their tokens, and the flat files that these make."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .encoding import Encoder
from .sources import Row

SPLITS = ("train", "held_out")
COUNTS = {"documents": int, "tokens": int, "bytes": int}
TOGETHER = 1 << 20  # characters that are tokenized together


class Texts(NamedTuple):
    """Documents or parts of them, as columns, which are sent to another process ten times faster than rows."""

    texts: list[str]
    begins: list[bool]  # whether a document begins with the text
    ends: list[bool]  # whether it ends with the text
    size: int  # of all texts in bytes


class Tokens(NamedTuple):
    """Tokens of texts, with the end token behind each document, and where documents end."""

    tokens: np.ndarray
    ends: np.ndarray
    size: int  # of the texts in bytes


class Block(NamedTuple):
    """Consecutive rows of the sources."""

    texts: dict[str, Texts]  # of each split
    bad: list[Row]  # which are no documents


def groups(items: Iterable[Any], limit: int, size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Consecutive items whose sizes are at least `limit` together, except those of the last group."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def blocks(rows: Iterable[tuple[Row, bool]], size: int) -> Iterator[Block]:
    """Consecutive rows, each with whether it is held out, of at least `size` bytes together."""
    for group in groups(rows, size, lambda row: row[0].size + 1):  # rows without text end, too
        texts = {split: texts_of(row for row, held in group if held == (split == "held_out")) for split in SPLITS}
        yield Block(texts, [row for row, _ in group if row.bad])


def texts_of(rows: Iterable[Row]) -> Texts:
    """The rows that are no bad ones, as columns."""
    mine = [row for row in rows if not row.bad]
    begins, ends = [row.offset == 0 for row in mine], [row.ends for row in mine]
    return Texts([row.text for row in mine], begins, ends, sum(row.size for row in mine))


# {what is wrong with rows: {"rows": their number, "first": the place of the first}}
BadRows = dict[str, dict[str, Any]]


def bad_rows(rows: Iterable[Row], before: BadRows | None = None) -> BadRows:
    """Counts the rows that are no documents, beside those that were counted before."""
    total = {} if before is None else before
    for row in rows:
        if row.bad:
            total.setdefault(row.bad, {"rows": 0, "first": row.where})["rows"] += 1
    return total


def left_out(bad: BadRows) -> list[str]:
    """A sentence for each kind of bad rows."""
    rows = [(what, own["rows"], own["first"]) for what, own in bad.items()]
    return [f"left out: {number:,} row{'s' * (number > 1)} {what}, first {first}" for what, number, first in rows]


def tokenized(of: Texts, encode: Encoder, end: int) -> Tokens:
    """The tokens of texts with the token `end` behind each document."""
    parts, places, passed = [np.empty(0, encode.word)], [np.empty(0, np.int64)], 0
    rows = zip(of.texts, of.begins, of.ends, strict=True)
    for group in groups(rows, TOGETHER, lambda row: len(row[0])):
        tokens, counts = encode([encode.begun(text) if begins else text for text, begins, _ in group])
        whole = np.cumsum(counts)[[ends for *_, ends in group]]  # where a document ends, without the end tokens
        parts.append(np.insert(tokens, whole, end))
        places.append(passed + whole + np.arange(1, len(whole) + 1))
        passed += len(parts[-1])
    return Tokens(np.concatenate(parts), np.concatenate(places), of.size)


class Array:
    """A file <name>.npy with one dimension, which grows: numpy leaves room in the header for any length."""

    def __init__(self, path: Path):
        self.file, self.length, self.dtype = path.open("wb"), 0, np.dtype(np.uint8)

    def add(self, numbers: np.ndarray) -> None:
        if not self.file.tell():
            self.dtype = numbers.dtype
            self._write_header()
        self.file.write(numbers.tobytes())  # numpy's `tofile` says of a full disk how many numbers it wrote
        self.length += len(numbers)

    def close(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.close()

    def _write_header(self) -> None:
        kind = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, kind)


class Split:
    """The files <name>.npy, all tokens of a split, and <name>.ends.npy, where documents end."""

    def __init__(self, folder: Path, name: str):
        self.tokens, self.ends, self.size = Array(folder / f"{name}.npy"), Array(folder / f"{name}.ends.npy"), 0

    def add(self, part: Tokens) -> None:
        self.ends.add(part.ends + self.tokens.length)
        self.tokens.add(part.tokens)
        self.size += part.size

    def counts(self, length: int) -> dict[str, int]:
        """Of documents, tokens, bytes of text, and rows of `length`."""
        tokens = self.tokens.length
        return {"documents": self.ends.length, "tokens": tokens, "bytes": self.size, "rows": -(-tokens // length)}

    def close(self) -> None:
        self.tokens.close()
        self.ends.close()
