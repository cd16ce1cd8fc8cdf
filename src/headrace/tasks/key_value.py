"""Associative recall with keys and values as separate tokens of a small vocabulary.

    position   1   2   3   4   5   6   7   8   9   10
    input      k3  v7  k1  v2  v5  k1  v4  v9  k3  v1        pairs, then queries among random values
    answer                         v2          v7

The model has to learn that a value belongs to the key before it, and then to store and retrieve it. The distances of
queries from the pairs follow a power law, so most queries come early. The task is easier than `mqar`, because there are
fewer tokens and each key after the pairs is a query. Values may repeat.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, Drawn

GAP_EXPONENT = -0.99  # exponent of the distribution of the distance of a query from the pairs


@dataclass(frozen=True)
class KeyValue(Drawn):
    """Associative recall with keys and values as separate tokens."""

    keys: int = 64  # number of different keys, and of different values
    pairs: int = 8
    length: int = 64

    name: ClassVar[str] = "key-value"

    def __post_init__(self) -> None:
        if not (1 <= self.pairs <= self.keys and 3 * self.pairs <= self.length):
            raise InputError(
                f"the task key-value has {self.pairs} pairs of {self.keys} different keys in a row of {self.length}; "
                "expected pairs <= keys and length >= 3 * pairs"
            )

    @property
    def chance(self) -> float:
        return 1 / self.keys

    @property
    def vocab_size(self) -> int:
        return 2 * self.keys

    def resized(self, length: int) -> "KeyValue":
        return replace(self, length=length, pairs=min(self.pairs, max(length // 3, 1)))

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        start, stop = self.keys, 2 * self.keys
        keys = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(start, stop, (rows, self.pairs), generator=generator)
        ids = torch.randint(start, stop, (rows, self.length), generator=generator)
        ids[:, : 2 * self.pairs] = torch.stack([keys, values], 2).flatten(1)
        asked_at = 2 * self.pairs + self._gaps(generator, rows)
        labels = torch.full_like(ids, IGNORED)
        return {"input_ids": ids.scatter(1, asked_at, keys), "shift_labels": labels.scatter(1, asked_at, values)}

    def _gaps(self, generator: torch.Generator, rows: int) -> torch.Tensor:
        """Distances of the queries from the pairs [rows, pairs], different within a row."""
        weights = torch.arange(1.0, self.length - 2 * self.pairs + 1).pow(GAP_EXPONENT)
        return torch.multinomial(weights.expand(rows, -1), self.pairs, generator=generator)
