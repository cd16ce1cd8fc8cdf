"""Chooses the documents that are held out for evaluation, in one pass over the documents."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..utils.errors import InputError
from .sources import Row

EXPECTED = 32  # held-out documents from which on each is drawn by itself: then none is drawn once in e^32 times


@dataclass(frozen=True)
class Choice:
    """Which documents are held out, by their number from 0 among the documents.

    Args:
        share: fraction of the documents.
        seed: of the draws.
        documents: the held-out documents, if they are chosen by number; None: each is drawn, with probability `share`.
        cut: (document, byte at which its held-out end begins), if the end of one document is held out.
    """

    share: float
    seed: int
    documents: frozenset[int] | None = None
    cut: tuple[int, int] | None = None

    def split(self, rows: Iterable[Row]) -> Iterator[tuple[Row, bool]]:
        """The rows in order, each with whether it is held out. The row in which a held-out end begins becomes two."""
        draw, document, held = np.random.default_rng(self.seed).random, -1, False
        for row in rows:
            if row.bad:
                yield row, False
                continue
            if row.offset == 0:
                document += 1
                held = draw() < self.share if self.documents is None else document in self.documents
            if self.cut and document == self.cut[0]:
                yield from _divided(row, self.cut[1])
            else:
                yield row, held


def _divided(row: Row, at: int) -> Iterator[tuple[Row, bool]]:
    """The parts of a row before and behind the byte `at` of its document."""
    before = at - row.offset
    if not 0 < before < row.size:
        yield (row, True) if before <= 0 else (row._replace(ends=row.ends or before == row.size), False)
        return
    first = row.text.encode()[:before].decode(errors="ignore") or row.text[0]  # not a part of a character
    size, second = len(first.encode()), row.text[len(first) :]
    yield row._replace(text=first, size=size, ends=True), False
    yield row._replace(text=second, size=row.size - size, offset=row.offset + size), True


def choose(rows: Iterable[Row], share: float, seed: int) -> Choice:
    """Chooses from rows, of which only the first are read if they are many. Of few documents, the number that is held
    out is exactly the share; if this is less than half a document, the end of one document is held out instead.

    InputError for no documents, or a share that no document is long enough for."""
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
            return _of_few(np.array(sizes), share, seed)
    if not sizes:
        raise InputError(f"the sources hold no documents{last and ': '}{last}; expected at least 1")
    return Choice(share, seed)


def _of_few(sizes: np.ndarray, share: float, seed: int) -> Choice:
    order = np.random.default_rng(seed).permutation(len(sizes))
    held_out = order[: min(round(share * len(sizes)), len(sizes) - 1)]
    if len(held_out):
        return Choice(share, seed, frozenset(held_out.tolist()))
    needed_bytes = max(round(share * int(sizes.sum())), 1)
    long = order[sizes[order] > needed_bytes]
    if not len(long):
        raise InputError(f"--held-out {share} is {needed_bytes} bytes of text; expected a document with more bytes")
    return Choice(share, seed, frozenset(), (int(long[0]), int(sizes[long[0]]) - needed_bytes))
