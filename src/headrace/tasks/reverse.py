"""Reversing a row of symbols, a sequence-to-sequence test of the longest source that a model can store.

    source   d a c c b
    target   b c c a d

Training lengths are uniform up to `length`; evaluation includes lengths up to twice that, if they have at least FEWEST
different sources.
"""

import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..utils.errors import InputError
from .base import Batch
from .sequences import Sequences

FEWEST = 50  # different sources of a length: of fewer, none may be held out


@dataclass(frozen=True)
class Reverse(Sequences):
    """Reversing a row of symbols."""

    symbols: int = 10
    length: int = 12
    shortest: int = 1

    name: ClassVar[str] = "reverse"

    def __post_init__(self) -> None:
        if not (1 <= self.symbols <= 26 and 1 <= self.shortest <= self.length):
            raise InputError(f"{self}; expected 1 to 26 symbols, and lengths with 1 <= shortest <= length")

    @property
    def alphabet(self) -> str:  # type: ignore[override]
        return string.ascii_lowercase[: self.symbols]

    @property
    def written(self) -> int:  # type: ignore[override]
        return self.length

    def resized(self, length: int) -> "Reverse":
        return replace(self, length=length)

    def pairs(self, generator: torch.Generator, rows: int) -> Iterator[tuple[str, str]]:
        symbols = torch.randint(self.symbols, (rows, self.length), generator=generator)
        lengths = torch.randint(self.shortest, self.length + 1, (rows,), generator=generator)
        for row, length in zip(symbols.tolist(), lengths.tolist(), strict=True):
            source = "".join(self.alphabet[i] for i in row[:length])
            yield source, source[::-1]

    def by_length(self, rows: int) -> dict[int, Batch]:
        lengths = {max(self.length * quarters // 4, 1) for quarters in range(1, 9)}
        large = (n for n in sorted(lengths) if self.symbols**n >= FEWEST)
        return {n: replace(self, length=n, shortest=n).held_out(rows) for n in large}
