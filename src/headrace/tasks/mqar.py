"""Multi-query associative recall (https://arxiv.org/abs/2312.04927), with the distribution of HazyResearch/zoology.

    position   1   2   3   4   5   6   7   8   9   10  11  12
    input      k3  v7  k1  v2  k1  x   x   x   k3  x   x   x        pairs, then queries; x is any token
    answer                     v2              v7

Tokens of the lower half of the vocabulary, without 0, are keys; those of the upper half are values. The keys of a row
differ from each other, as do the values, and each key is queried once. A query is 2g positions after the pairs. The g
of a row are drawn without replacement with weights (g + 1)^(power_a − 1): most queries come early. All else is noise
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
    """Multi-query associative recall."""

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

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
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
        """Indices [rows, pairs], drawn without replacement within a row by the weights."""
        return torch.multinomial(weights.expand(rows, -1), self.pairs, generator=generator)

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Held-out rows at LONGER multiples of the training length below the size of the vocabulary."""
        lengths = [times * self.length for times in LONGER if times * self.length < self.vocabulary]
        return {length: self.resized(length).held_out(rows) for length in lengths}
