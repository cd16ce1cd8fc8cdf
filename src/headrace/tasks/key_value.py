"""Associative recall in a small vocabulary of nothing but keys and values, which are tokens of their own.

    position   1   2   3   4   5   6   7   8   9   10
    input      k3  v7  k1  v2  v5  k1  v4  v9  k3  v1        pairs, then queries among values that mean nothing
    answer                         v2          v7

The model has first to learn that a value belongs to the key before it, then to store, find and say it. Most queries
come soon after the pairs, some late: gaps follow a power law. Easier than `mqar`: there are fewer tokens, and a key
after the pairs is always a query. Values may repeat.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, Drawn

GAP_EXPONENT = -0.99  # of the density of a query's distance from the pairs


@dataclass(frozen=True)
class KeyValue(Drawn):
    keys: int = 64  # and as many values
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

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        start, stop = self.keys, 2 * self.keys
        keys = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(start, stop, (rows, self.pairs), generator=generator)
        ids = torch.randint(start, stop, (rows, self.length), generator=generator)
        ids[:, : 2 * self.pairs] = torch.stack([keys, values], 2).flatten(1)
        asked_at = 2 * self.pairs + self._gaps(generator, rows)
        labels = torch.full_like(ids, IGNORED)
        return {"input_ids": ids.scatter(1, asked_at, keys), "shift_labels": labels.scatter(1, asked_at, values)}

    def _gaps(self, generator: torch.Generator, rows: int) -> torch.Tensor:
        """Different distances from the pairs, [rows, pairs]."""
        weights = torch.arange(1.0, self.length - 2 * self.pairs + 1).pow(GAP_EXPONENT)
        return torch.multinomial(weights.expand(rows, -1), self.pairs, generator=generator)
