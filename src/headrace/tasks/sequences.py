"""Sequence-to-sequence tasks: pairs of a source text and a target text, with characters as tokens.

Rows are {"input_ids": [rows, L], "attention_mask": [rows, L], "shift_labels": [rows, T]}, padded at the end.
"""

import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, ByRow, SplitByContent

START, END, FIRST = 0, 1, 2  # start of a target and padding of a source; end of a target; first character
FEWEST = 50  # different sources of a length: of fewer, none may be held out


class Sequences(SplitByContent, ByRow):
    """Base of sequence-to-sequence tasks. A row is correct if every target character is predicted correctly given the
    true characters before it, which holds exactly if greedy decoding gives the target."""

    alphabet: Any  # str
    length: Any  # int: length of the longest source
    written: Any  # int: length of the longest target

    @property
    def vocab_size(self) -> int:
        return FIRST + len(self.alphabet)

    def pairs(self, generator: torch.Generator, rows: int) -> Iterable[tuple[str, str]]:
        raise TypeError(f"{type(self).__name__} does not define pairs()")

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        sources, targets = zip(*self.pairs(generator, rows), strict=True)
        ids = torch.full((rows, self.length), START)
        labels = torch.full((rows, self.written + 1), IGNORED)
        for i, (source, target) in enumerate(zip(map(self.tokens, sources), map(self.tokens, targets), strict=True)):
            ids[i, : len(source)] = torch.tensor(source)
            labels[i, : len(target) + 1] = torch.tensor([*target, END])
        return {"input_ids": ids, "attention_mask": ids != START, "shift_labels": labels}

    def content(self, drawn: Batch) -> Tensor:
        """The source without its padding, so that its part is the same in rows of every length."""
        return drawn["input_ids"].masked_fill(~drawn["attention_mask"], IGNORED)

    def tokens(self, text: str) -> list[int]:
        return [FIRST + self.alphabet.index(character) for character in text]

    def text(self, ids: Tensor) -> list[str]:
        """A string for each token that is not padding."""
        return [self.alphabet[i - FIRST] if i >= FIRST else "end" for i in ids.tolist() if i > START]


@dataclass(frozen=True)
class Reverse(Sequences):
    """Reversing a row of symbols, a sequence-to-sequence test of the longest source that a model can store.

        source   d a c c b
        target   b c c a d

    Training lengths are uniform up to `length`; evaluation includes lengths up to twice that, if they have at least
    FEWEST different sources.
    """

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
