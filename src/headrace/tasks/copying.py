"""Copying and recalling single symbols of a row."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, OfSymbols


@dataclass(frozen=True)
class Copy(OfSymbols):
    """Copying: a row of symbols, a mark, and the symbols again (https://arxiv.org/abs/2402.01032).

        position   1  2  3  4  5  6  7  8
        input      c  a  a  b  |  c  a  a
        answer                 c  a  a  b

    A model has to store the whole input in order, which a state of fixed size can do up to some length only.
    """

    symbols: int = 16
    length: int = 64  # positions in a row: twice the number of copied symbols

    name: ClassVar[str] = "copy"

    def __post_init__(self) -> None:
        if self.symbols < 2 or self.length < 2 or self.length % 2:
            raise InputError(
                f"{self}; expected at least 2 symbols and an even length, which is twice the number of symbols copied"
            )

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        source = torch.randint(self.symbols, (rows, self.length // 2), generator=generator)
        mark = torch.full((rows, 1), self.symbols)
        unasked = torch.full_like(source, IGNORED)
        return {
            "input_ids": torch.cat([source, mark, source[:, :-1]], 1),
            "shift_labels": torch.cat([unasked, source], 1),
        }


@dataclass(frozen=True)
class SelectiveCopy(OfSymbols):
    """Selective copying (https://arxiv.org/abs/2312.00752, section 3.1): copying symbols in order from among noise
    tokens.

        position   1  2  3  4  5  6  7  8  9  10
        input      .  c  .  .  a  b  .  ?  ?  ?
        answer                          c  a  b

    The positions of the symbols vary from row to row, so that a model has to select by content.
    """

    symbols: int = 14
    copied: int = 16  # number of symbols to copy in a row
    length: int = 128

    name: ClassVar[str] = "selective-copy"
    marks = 2  # the noise token and the query token

    def __post_init__(self) -> None:
        if not (self.symbols >= 2 and self.copied >= 1 and 2 * self.copied <= self.length):
            raise InputError(f"{self}; expected at least 2 symbols, and 1 <= copied <= length / 2")

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        source = torch.randint(self.symbols, (rows, self.copied), generator=generator)
        read = self.length - self.copied
        places = torch.rand(rows, read, generator=generator).argsort(1)[:, : self.copied].sort(1).values
        noise = torch.full((rows, read), self.symbols)
        return {
            "input_ids": torch.cat([noise.scatter(1, places, source), torch.full_like(source, self.symbols + 1)], 1),
            "shift_labels": torch.cat([torch.full_like(noise, IGNORED), source], 1),
        }


@dataclass(frozen=True)
class Induction(OfSymbols):
    """Induction heads (https://arxiv.org/abs/2209.11895, as in https://arxiv.org/abs/2312.00752, section 4.1.2):
    recalling the token that followed the special token at its first occurrence.

        position   1  2  3  4  5  6  7  8
        input      b  a  !  c  a  c  b  !
        answer                          c

    A model has to store a single token over a long distance.
    """

    symbols: int = 15
    length: int = 128

    name: ClassVar[str] = "induction"

    def __post_init__(self) -> None:
        if self.symbols < 2 or self.length < 3:
            raise InputError(f"{self}; expected at least 2 symbols and a length of at least 3")

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        ids = torch.randint(self.symbols, (rows, self.length), generator=generator)
        place = torch.randint(self.length - 2, (rows, 1), generator=generator)
        ids = ids.scatter(1, place, self.symbols)
        ids[:, -1] = self.symbols
        labels = torch.full_like(ids, IGNORED)
        labels[:, -1] = ids.gather(1, place + 1)[:, 0]
        return {"input_ids": ids, "shift_labels": labels}
