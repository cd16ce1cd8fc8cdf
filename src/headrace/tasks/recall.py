"""Associative recall with keys and values as separate tokens: pairs, then queries among random tokens."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from ..utils.errors import InputError, require
from .base import LONGER, Batch, Drawn

GAP_EXPONENT = -0.99  # of the distribution of the distance of a query of `key-value` from the pairs
LARGEST = 2**24  # number of things from which torch.multinomial draws


class Recall(Drawn):
    """Base of these tasks."""

    pairs: Any  # int
    positions: ClassVar[int]  # fewest positions of a row for each pair

    def resized(self, length: int) -> Any:
        pairs = min(self.pairs, max(length // self.positions, 1))
        return replace(self, length=length, pairs=pairs)  # type: ignore[type-var]

    def different(self, weights: Tensor, generator: torch.Generator, rows: int) -> Tensor:
        """Indices [rows, pairs], drawn without replacement within a row by the weights."""
        return torch.multinomial(weights.expand(rows, -1), self.pairs, generator=generator)

    def asked(self, ids: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> Batch:
        """Rows of pairs, then the rest of the random `ids` [rows, length], where each key stands again at its place."""
        ids[:, : 2 * self.pairs] = torch.stack([keys, values], 2).flatten(1)
        labels = torch.full_like(ids, IGNORED)
        return {"input_ids": ids.scatter(1, places, keys), "shift_labels": labels.scatter(1, places, values)}


@dataclass(frozen=True)
class KeyValue(Recall):
    """Associative recall with keys and values as separate tokens of a small vocabulary.

        position   1   2   3   4   5   6   7   8   9   10
        input      k3  v7  k1  v2  v5  k1  v4  v9  k3  v1        pairs, then queries among random values
        answer                         v2          v7

    The model has to learn that a value belongs to the key before it, and then to store and retrieve it. The distances
    of queries from the pairs follow a power law, so most queries come early. The task is easier than `mqar`, because
    there are fewer tokens and each key after the pairs is a query. Values may repeat.
    """

    keys: int = 64  # number of different keys, and of different values
    pairs: int = 8
    length: int = 64

    name: ClassVar[str] = "key-value"
    positions: ClassVar[int] = 3

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

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        start, stop = self.keys, 2 * self.keys
        keys = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(start, stop, (rows, self.pairs), generator=generator)
        ids = torch.randint(start, stop, (rows, self.length), generator=generator)
        weights = torch.arange(1.0, self.length - 2 * self.pairs + 1).pow(GAP_EXPONENT)
        return self.asked(ids, keys, values, 2 * self.pairs + self.different(weights, generator, rows))


@dataclass(frozen=True)
class Mqar(Recall):
    """Multi-query associative recall (https://arxiv.org/abs/2312.04927), with the distribution of HazyResearch/zoology.

        position   1   2   3   4   5   6   7   8   9   10  11  12
        input      k3  v7  k1  v2  k1  x   x   x   k3  x   x   x        pairs, then queries; x is any token
        answer                     v2              v7

    Tokens of the lower half of the vocabulary, without 0, are keys; those of the upper half are values. The keys of a
    row differ from each other, as do the values, and each key is queried once. A query is 2g positions after the pairs.
    The g of a row are drawn without replacement with weights (g + 1)^(power_a − 1): most queries come early. All else
    is noise from the whole vocabulary, keys of the row among it.
    """

    vocabulary: int = 8192
    pairs: int = 8
    length: int = 64
    power_a: float = 0.01  # 1: all distances are equally likely

    name: ClassVar[str] = "mqar"
    positions: ClassVar[int] = 4

    def __post_init__(self) -> None:
        even = self.length % 2 == 0
        if not (even and self.pairs >= 1 and 4 * self.pairs <= self.length < self.vocabulary <= LARGEST):
            raise InputError(
                f"the task mqar has {self.pairs} pairs in a row of {self.length} with a vocabulary of "
                f"{self.vocabulary}; expected pairs >= 1, an even length >= 4 * pairs, and length < vocabulary <= 2^24"
            )
        require(0 < self.power_a <= 1, f"mqar.power_a={self.power_a}; expected more than 0 and at most 1")

    @property
    def chance(self) -> float:
        return 1 / (self.vocabulary - self.vocabulary // 2)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        half, space = self.vocabulary // 2, self.length // 2 - self.pairs
        keys = self.different(torch.ones(half - 1), generator, rows) + 1
        values = self.different(torch.ones(self.vocabulary - half), generator, rows) + half
        gaps = self.different(torch.arange(1.0, space + 1).pow(self.power_a - 1), generator, rows)
        ids = torch.randint(self.vocabulary, (rows, self.length), generator=generator)
        return self.asked(ids, keys, values, 2 * (self.pairs + gaps))

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Held-out rows at LONGER multiples of the training length below the size of the vocabulary."""
        lengths = [times * self.length for times in LONGER if times * self.length < self.vocabulary]
        return {length: self.resized(length).held_out(rows) for length in lengths}
