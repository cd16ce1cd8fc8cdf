"""Chooses what is held out for evaluation: whole documents or, where there are few, pieces drawn over all of the text.

The end of a book is no sample of the book: its loss would be that of other people and places."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..utils.errors import require

EXPECTED = 32  # held-out documents from which on each is drawn by itself: none at all is drawn once in e^32 times
FEW = 20  # documents below which pieces are held out
PIECES, PIECE = 32, 4096  # the largest number of pieces, and the smallest size in bytes of each if there are several
PARAGRAPH = 2048  # the largest number of bytes by which the beginning and the end of a piece are moved

Span = tuple[int, int]  # bytes of all documents, one after another: the first of a piece, and the first behind it


class Row(NamedTuple):
    """A document of a source, a part of one, or a row that is no document.

    text: the text; of a row without the column of the text, the columns that it has.
    offset: bytes of the document before `text`.
    ends: whether the document ends with `text`.
    bad: why the row is no document, in words that fit many rows; "" for a document.
    """

    source: str
    number: int  # in its source, from 1
    text: str = ""
    size: int = 0  # of the text in bytes
    offset: int = 0
    ends: bool = True
    bad: str = ""

    @property
    def where(self) -> str:
        return f"{self.source} row {self.number}" + (f", with {self.text}" if self.bad and self.text else "")


@dataclass(frozen=True)
class Choice:
    """What is held out.

    Args:
        share: fraction of the documents.
        seed: of the draws.
        documents: the held-out documents, if they are chosen by number, from 0; None: each is drawn, with probability
            `share`.
        spans: the held-out pieces, in order, in place of documents.
    """

    share: float
    seed: int
    documents: frozenset[int] | None = None
    spans: tuple[Span, ...] = ()

    def split(self, rows: Iterable[Row]) -> Iterator[tuple[Row, bool]]:
        """The rows in order, each with whether it is held out. A row in which a piece begins or ends is divided."""
        draw, document, held, begin = np.random.default_rng(self.seed).random, -1, False, 0
        for row in rows:
            if row.bad:
                yield row, False
                continue
            if row.offset == 0:
                document += 1
                held = draw() < self.share if self.documents is None else document in self.documents
            if self.spans:
                yield from _divided(row, [(first - begin, last - begin) for first, last in self.spans])
                begin += row.size
            else:
                yield row, held


def _divided(row: Row, spans: list[Span]) -> Iterator[tuple[Row, bool]]:
    """The parts of a row, each with whether it is held out. spans: in bytes from the beginning of the row."""
    places = sorted({0, row.size, *(place for span in spans for place in span if 0 < place < row.size)})
    held = [any(first <= place < last for first, last in spans) for place in places]  # from there on, to the next place
    data = row.text.encode() if len(places) > 2 else b""
    for i, (first, last) in enumerate(pairwise(places)):
        text = data[first:last].decode() if data else row.text
        ends = row.ends or held[i] != held[i + 1]
        yield row._replace(text=text, size=last - first, offset=row.offset + first, ends=ends), held[i]


def _between_paragraphs(choice: Choice, rows: Iterable[Row]) -> Choice:
    """The choice with its pieces moved so that each begins and ends with a paragraph or, if there is none near, with a
    line or a character. rows: all, from the first."""
    reach = {place: min(PARAGRAPH, (last - first) // 2) for first, last in choice.spans for place in (first, last)}
    left, moved, begin, data = sorted(reach), {}, 0, b""  # data: the bytes from `begin` on
    for row in rows:
        data += b"" if row.bad else row.text.encode()
        while left and left[0] + PARAGRAPH <= begin + len(data):
            place = left.pop(0)
            moved[place] = begin + _paragraph(data, place - begin, reach[place])
        needed = min(left[0] - 2 if left else begin + len(data), begin + len(data))
        data, begin = data[max(needed - begin, 0) :], max(needed, begin)
    moved |= {place: begin + _paragraph(data, place - begin, reach[place]) for place in left}
    return replace(choice, spans=tuple((moved[first], moved[last]) for first, last in choice.spans))


def _paragraph(data: bytes, place: int, reach: int) -> int:
    """The beginning of the next paragraph at or behind a place or, if none is within reach, of a line or character."""
    for mark in (b"\n\n", b"\n"):
        at = data.find(mark, max(place - len(mark), 0), place + reach)
        if at >= 0:
            return at + len(mark)
    while place < len(data) and data[place] & 0xC0 == 0x80:  # within a character
        place += 1
    return place


def choose(rows: Callable[[], Iterable[Row]], share: float, seed: int) -> Choice:
    """Chooses what to hold out of the rows, which each call of `rows` gives anew. Of many rows only the first are read.
    Of fewer than EXPECTED / share documents, exactly the share is held out. Of fewer than FEW, or if the share is less
    than half a document, pieces of the text are held out, cut between paragraphs where it has some.

    InputError for no documents, or a single byte of text."""
    choice = _chosen(rows(), share, seed)
    return _between_paragraphs(choice, rows()) if choice.spans else choice


def _chosen(rows: Iterable[Row], share: float, seed: int) -> Choice:
    sizes: list[int] = []
    last = ""
    for read, row in enumerate(rows):
        if row.bad:
            last = last or f"{row.where} is {row.bad}"
        elif row.offset == 0:
            sizes.append(row.size)
        else:
            sizes[-1] += row.size
        if max(len(sizes), 0 if sizes else read) * share > EXPECTED:
            break
    else:
        if sizes:
            return _of_few(sizes, share, seed)
    require(bool(sizes), f"the sources hold no documents{last and ': '}{last}; expected at least 1")
    return Choice(share, seed)


def _of_few(sizes: list[int], share: float, seed: int) -> Choice:
    number, generator = round(share * len(sizes)), np.random.default_rng(seed)
    if len(sizes) >= FEW and number:
        order = generator.permutation(len(sizes))
        return Choice(share, seed, frozenset(order[: min(number, len(sizes) - 1)].tolist()))
    whole = sum(sizes)
    require(whole >= 2, f"{whole} byte of text, of which {share:.2g} is to be held out; expected more text")
    return Choice(share, seed, spans=_spans(whole, min(max(round(share * whole), 1), whole - 1), generator))


def _spans(whole: int, held_out: int, generator: np.random.Generator) -> tuple[Span, ...]:
    """Pieces of `held_out` bytes together, one at a random place in each of as many equal parts of the text."""
    number = min(max(held_out // PIECE, 1), PIECES, whole - held_out)  # no part is shorter than its piece
    parts, sizes = np.linspace(0, whole, number + 1).astype(int), np.full(number, held_out // number)
    sizes[: held_out % number] += 1
    begins = generator.integers(parts[:-1], parts[1:] - sizes, endpoint=True)
    return tuple((int(begin), int(begin + size)) for begin, size in zip(begins, sizes, strict=True))
