"""Tokenized parts of prepared data, each written once, and the flat files that they make together:

<number>.npz    tokens and ends of documents, of the training and of the held-out text of one block
<number>.json   its counts and SHA-256: written last, so that a part with a record is whole
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..files.checks import RECORDED, damage, read_json
from ..utils.integrity import atomic, record, write_json
from .encoding import Encoder
from .sources import Row

SPLITS = ("train", "held_out")
COUNTS = {"documents": int, "tokens": int, "bytes": int}
# the form of <number>.json
PART_RECORD = {**dict.fromkeys(SPLITS, COUNTS), "bad": {...: {"rows": int}}, "files": RECORDED}
TOGETHER = 1 << 20  # characters that are tokenized together


class Texts(NamedTuple):
    """Documents or parts of them, as columns, which are sent to another process ten times faster than rows."""

    texts: list[str]
    begins: list[bool]  # whether a document begins with the text
    ends: list[bool]  # whether it ends with the text
    size: int  # of all texts in bytes


class Block(NamedTuple):
    """What becomes one part: consecutive rows of the sources."""

    number: int
    texts: dict[str, Texts]  # of each split
    bad: dict[str, dict[str, Any]]  # {what is wrong with rows: {"rows": their number, "first": the place of the first}}


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


def blocks(rows: Iterable[tuple[Row, bool]], size: int) -> Iterator[list[tuple[Row, bool]]]:
    """Consecutive rows, for `block`, of at least `size` bytes together."""
    return groups(rows, size, lambda row: row[0].size + 1)  # rows without text end, too


def block(number: int, rows: list[tuple[Row, bool]]) -> Block:
    """A block of rows, each with whether it is held out."""
    texts = {split: texts_of(row for row, held in rows if held == (split == "held_out")) for split in SPLITS}
    return Block(number, texts, bad_rows(row for row, _ in rows))


def texts_of(rows: Iterable[Row]) -> Texts:
    """The rows that are no bad ones, as columns."""
    mine = [row for row in rows if not row.bad]
    begins, ends = [row.offset == 0 for row in mine], [row.ends for row in mine]
    return Texts([row.text for row in mine], begins, ends, sum(row.size for row in mine))


def bad_rows(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    return count_bad_rows({"bad": {row.bad: {"rows": 1, "first": row.where}}} for row in rows if row.bad)


def count_bad_rows(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The bad rows of all parts, by what is wrong with them."""
    total: dict[str, dict[str, Any]] = {}
    for part in records:
        for reason, rows in part["bad"].items():
            total.setdefault(reason, {"rows": 0, "first": rows["first"]})["rows"] += rows["rows"]
    return total


def left_out(bad: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each kind of bad rows."""
    rows = [(what, own["rows"], own["first"]) for what, own in bad.items()]
    return [f"left out: {number:,} row{'s' * (number > 1)} {what}, first {first}" for what, number, first in rows]


def path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.npz"


def read_finished(folder: Path, number: int) -> dict[str, Any] | None:
    """The record of a part; None if there is no whole part."""
    path_of_record = path(folder, number).with_suffix(".json")
    if not path_of_record.exists():
        return None
    record = read_json(path_of_record, PART_RECORD)
    return None if damage(folder, record["files"]) else record


def write(block: Block, encode: Encoder, end: int, folder: Path) -> dict[str, Any]:
    """Tokenizes a block into a part, each document with the token `end` behind it, and returns the record."""
    arrays: dict[str, Any] = {}
    counts = {}
    for split, texts in block.texts.items():
        tokens, ends = tokenized(texts, encode, end)
        arrays |= {split: tokens, f"{split}.ends": ends}
        counts[split] = {"documents": len(ends), "tokens": len(tokens), "bytes": texts.size}
    file_of = path(folder, block.number)
    with atomic(file_of, "wb") as file:
        np.savez(file, **arrays)
    written = {**counts, "bad": block.bad, "files": record(folder, file_of.name)}
    write_json(file_of.with_suffix(".json"), written)
    return written


def tokenized(of: Texts, encode: Encoder, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of texts with the token `end` behind each document, and where each document ends."""
    parts, places, passed = [np.empty(0, encode.word)], [np.empty(0, np.int64)], 0
    rows = zip(of.texts, of.begins, of.ends, strict=True)
    for group in groups(rows, TOGETHER, lambda row: len(row[0])):
        tokens, counts = encode([encode.begun(text) if begins else text for text, begins, _ in group])
        whole = np.cumsum(counts)[[ends for *_, ends in group]]  # where a document ends, without the end tokens
        parts.append(np.insert(tokens, whole, end))
        places.append(passed + whole + np.arange(1, len(whole) + 1))
        passed += len(parts[-1])
    return np.concatenate(parts), np.concatenate(places)


def assemble(parts: list[tuple[Path, dict[str, Any]]], folder: Path) -> None:
    """Writes <split>.npy, the tokens of the parts one after another, and <split>.ends.npy, where documents end.

    made: the parts with their records."""
    for split in SPLITS:
        counts = [record[split] for _, record in parts]
        begins = np.cumsum([0, *(count["tokens"] for count in counts)])
        _write(folder / f"{split}.npy", int(begins[-1]), (_read(part, split) for part, _ in parts))
        ends = (_read(part, f"{split}.ends") + begin for (part, _), begin in zip(parts, begins, strict=False))
        _write(folder / f"{split}.ends.npy", sum(count["documents"] for count in counts), ends)


def _read(part: Path, array: str) -> np.ndarray:
    with np.load(part) as arrays:
        return arrays[array]


def _write(path: Path, length: int, arrays: Iterator[np.ndarray]) -> None:
    """Writes one-dimensional arrays as one .npy file of a known length, one at a time."""
    with path.open("wb") as file:
        for i, array in enumerate(arrays):
            if i == 0:
                kind = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": (length,)}
                np.lib.format.write_array_header_1_0(file, kind)
            array.tofile(file)
