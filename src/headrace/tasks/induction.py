"""Induction heads (https://arxiv.org/abs/2209.11895, as in https://arxiv.org/abs/2312.00752, section 4.1.2): recalling
the token that followed the special token at its first occurrence.

    position   1  2  3  4  5  6  7  8
    input      b  a  !  c  a  c  b  !
    answer                          c

A model has to store a single token over a long distance.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, OfSymbols


@dataclass(frozen=True)
class Induction(OfSymbols):
    """Recall of the token after the special token."""

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
