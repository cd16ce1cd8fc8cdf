"""Selective copying (https://arxiv.org/abs/2312.00752, section 3.1): copying symbols in order from among noise tokens.

    position   1  2  3  4  5  6  7  8  9  10
    input      .  c  .  .  a  b  .  ?  ?  ?
    answer                          c  a  b

The positions of the symbols vary from row to row, so that a model has to select by content.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, OfSymbols


@dataclass(frozen=True)
class SelectiveCopy(OfSymbols):
    """Copying symbols from among noise."""

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
