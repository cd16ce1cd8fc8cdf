"""Associative recall, one pair per position: how much does a memory hold?

    position   1        2        3        4        5        6
    input      k3 + v7  k1 + v2  k4 + v7  k4       k3       k1       (embeddings of key and value, summed)
    answer                                v7       v7       v2

Because key and value arrive together, nothing has to be learnt about which token follows which: a row of T positions
asks what one layer can store and find again.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, Drawn


@dataclass(frozen=True)
class Pair(Drawn):
    keys: int = 32  # and as many values
    pairs: int = 24  # stored, with different keys
    queries: int | None = None  # asked afterwards, each pair at most once; None: all

    name: ClassVar[str] = "pair"

    def __post_init__(self) -> None:
        if not 1 <= self.asked <= self.pairs <= self.keys:
            raise InputError(
                f"the task pair asks {self.asked} of {self.pairs} pairs with {self.keys} different keys; "
                "expected 1 <= queries <= pairs <= keys"
            )

    @property
    def asked(self) -> int:
        return self.pairs if self.queries is None else self.queries

    @property
    def chance(self) -> float:
        return 1 / self.keys

    @property
    def vocab_size(self) -> int:
        return 2 * self.keys

    @property
    def length(self) -> int:
        return self.pairs + self.asked

    def resized(self, length: int) -> "Pair":
        if length < 2 or length % 2:
            raise InputError(f"length={length}: a row of the task pair is pairs and as many queries; expected even")
        return replace(self, keys=max(self.keys, length // 2), pairs=length // 2, queries=None)

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        keys = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(self.keys, 2 * self.keys, (rows, self.pairs), generator=generator)
        asked = torch.rand(rows, self.pairs, generator=generator).argsort(1)[:, : self.asked]
        nothing = torch.full_like(asked, -1)
        stored, queried = torch.stack([keys, values], 2), torch.stack([keys.gather(1, asked), nothing], 2)
        unasked = torch.full((rows, self.pairs), IGNORED)
        return {
            "input_ids": torch.cat([stored, queried], 1),
            "shift_labels": torch.cat([unasked, values.gather(1, asked)], 1),
        }

    def by_length(self, rows: int) -> dict[int, Batch]:
        return {}  # a longer row has more keys, which are tokens of their own
