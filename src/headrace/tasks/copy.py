"""Copying: a row of symbols, a mark, and the symbols again (https://arxiv.org/abs/2402.01032).

    position   1  2  3  4  5  6  7  8
    input      c  a  a  b  |  c  a  a
    answer                 c  a  a  b

A model has to store the whole input in order, which a state of fixed size can do up to some length only.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, OfSymbols


@dataclass(frozen=True)
class Copy(OfSymbols):
    """Copying a row of symbols."""

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
