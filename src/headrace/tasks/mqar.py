"""Multi-query associative recall (https://arxiv.org/abs/2312.04927), as HazyResearch/zoology draws it.

    position   1   2   3   4   5   6   7   8   9   10  11  12
    input      k3  v7  k1  v2  k1  x   x   x   k3  x   x   x        pairs, then queries; x is any token
    answer                     v2              v7

The lower half of the vocabulary without 0 is keys, the upper half values. All keys of a row differ, as do its values,
and every key is asked for once. A query is an even number of positions after the pairs, 2g, where the different g of a
row are drawn one after another with weights (g + 1)^(power_a − 1): most come soon, some late. All else is noise
from the whole vocabulary, keys of the row among it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import LONGER, Batch, Drawn


@dataclass(frozen=True)
class Mqar(Drawn):
    vocabulary: int = 8192
    pairs: int = 8
    length: int = 64
    power_a: float = 0.01  # 1: all distances are equally likely

    name: ClassVar[str] = "mqar"

    def __post_init__(self) -> None:
        even = self.length % 2 == 0
        if not (even and self.pairs >= 1 and 4 * self.pairs <= self.length < self.vocabulary):
            raise InputError(
                f"the task mqar has {self.pairs} pairs in a row of {self.length} with a vocabulary of "
                f"{self.vocabulary}; expected pairs >= 1, an even length >= 4 * pairs and a vocabulary > length"
            )
        if not 0 < self.power_a <= 1:
            raise InputError(f"mqar.power_a={self.power_a}; expected more than 0 and at most 1")

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary - self.vocabulary // 2)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    def resized(self, length: int) -> "Mqar":
        return replace(self, length=length, pairs=min(self.pairs, max(length // 4, 1)))

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        half, space = self.vocabulary // 2, self.length // 2 - self.pairs
        keys = self._different(torch.ones(half - 1), generator, rows) + 1
        values = self._different(torch.ones(self.vocabulary - half), generator, rows) + half
        gaps = self._different(torch.arange(1.0, space + 1).pow(self.power_a - 1), generator, rows)
        asked_at = 2 * (self.pairs + gaps)
        ids = torch.randint(self.vocabulary, (rows, self.length), generator=generator)
        ids[:, : 2 * self.pairs] = torch.stack([keys, values], 2).flatten(1)
        labels = torch.full_like(ids, IGNORED)
        return {"input_ids": ids.scatter(1, asked_at, keys), "shift_labels": labels.scatter(1, asked_at, values)}

    def _different(self, weights: torch.Tensor, generator: torch.Generator, rows: int) -> torch.Tensor:
        """As many different indices as there are pairs, drawn one after another by these weights, [rows, pairs]."""
        return torch.multinomial(weights.expand(rows, -1), self.pairs, generator=generator)

    def by_length(self, rows: int) -> dict[int, Batch]:
        """As far as the vocabulary admits."""
        lengths = [times * self.length for times in LONGER if times * self.length < self.vocabulary]
        return {length: self.resized(length).held_out(rows) for length in lengths}
