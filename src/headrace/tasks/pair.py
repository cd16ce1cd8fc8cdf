"""Associative recall with key and value at one position, a test of the capacity of a memory.

    position   1        2        3        4        5        6
    input      k3 + v7  k1 + v2  k4 + v7  k4       k3       k1       (embeddings of key and value, summed)
    answer                                v7       v7       v2

As the embeddings of key and value are summed at one position, a model need not learn which value follows which key, so
one layer is enough.

With `least`, every row stores its own number of pairs, drawn from `least` to `pairs`; the positions before the pairs
and after the queries are then empty.

With `clusters`, a key is the sum of two embeddings, one of its cluster and one of its place in the cluster, so that the
keys of a cluster resemble each other.

With `overwritten`, every key is stored before with another value, which the memory must forget. With `distractors=n`, n
pairs that are never asked are added for each stored pair, at random places; they have keys of their own.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, Drawn

EMPTY = -1  # in place of a key or value: adds no embedding
TESTED = 8  # numbers of pairs at which rows of different numbers are evaluated


@dataclass(frozen=True)
class Pair(Drawn):
    """Associative recall with one pair per position."""

    keys: int = 32  # number of different keys, and of different values
    pairs: int = 24  # number of stored pairs, with different keys
    queries: int | None = None  # number of queries, at most one for each pair; None: one for each
    least: int | None = None  # smallest number of pairs of a row, drawn up to `pairs`; None: every row has `pairs`
    clusters: int | None = None  # number of equally large clusters of keys; None: every key has an embedding of its own
    overwritten: bool = False  # whether every key is stored twice, first with a value that is not the answer
    distractors: int = 0  # number of pairs that are never asked, for each stored pair

    name: ClassVar[str] = "pair"

    def __post_init__(self) -> None:
        if not 1 <= self.asked <= self.pairs <= self.keys:
            raise InputError(
                f"the task pair asks {self.asked} of {self.pairs} pairs with {self.keys} different keys; "
                "expected 1 <= queries <= pairs <= keys"
            )
        if self.least is not None and (self.queries is not None or not 1 <= self.least <= self.pairs):
            raise InputError(
                f"the task pair has least={self.least} with pairs={self.pairs} and queries={self.queries}; expected "
                "1 <= least <= pairs, and no queries, as every pair of a row is asked"
            )
        if self.clusters is not None and (not 2 <= self.clusters <= self.keys // 2 or self.keys % self.clusters):
            raise InputError(
                f"the task pair has clusters={self.clusters} of {self.keys} keys; expected at least 2 of equal size, "
                "with at least 2 keys each"
            )
        if self.overwritten and self.keys < 2:
            raise InputError("the task pair is overwritten with keys=1; expected at least 2, for two different values")
        if self.distractors < 0 or (self.distractors and self.clusters is not None):
            raise InputError(
                f"the task pair has distractors={self.distractors} with clusters={self.clusters}; expected none, or a "
                "positive number without clusters"
            )

    @property
    def asked(self) -> int:
        return self.pairs if self.queries is None else self.queries

    @property
    def chance(self) -> float:
        return 1 / self.keys

    @property
    def vocab_size(self) -> int:
        return (3 if self.distractors else 2) * self.keys

    @property
    def length(self) -> int:
        return self.pairs * (1 + self.overwritten + self.distractors) + self.asked

    def resized(self, length: int) -> "Pair":
        parts, asked = 1 + (self.queries is None) + self.overwritten + self.distractors, self.queries or 0
        pairs, rest = divmod(length - asked, parts)
        if pairs < 1 or rest:
            raise InputError(
                f"length={length}: a row of the task pair has {parts} positions for each pair; expected a positive "
                f"multiple of {parts}" + (f" and the {asked} queries" if asked else "")
            )
        return replace(self, keys=max(self.keys, pairs), pairs=pairs)

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        keys = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(self.keys, 2 * self.keys, (rows, self.pairs), generator=generator)
        order = torch.rand(rows, self.pairs, generator=generator)
        is_pair = torch.ones(rows, self.pairs, dtype=torch.bool)
        if self.least is not None:
            numbers = torch.randint(self.least, self.pairs + 1, (rows, 1), generator=generator)
            is_pair = torch.arange(self.pairs) >= self.pairs - numbers
        queried_pairs = (order + ~is_pair).argsort(1)[:, : self.asked]  # empty positions last
        is_query = is_pair.gather(1, queried_pairs)
        stored = self._tokens(keys, values).where(is_pair[..., None], EMPTY)
        asked = self._tokens(keys.gather(1, queried_pairs), torch.full_like(queried_pairs, EMPTY))
        queried = asked.where(is_query[..., None], EMPTY)
        before = self._overwritten(generator, keys, values, is_pair)
        stored = torch.cat([before, self._distracted(generator, stored, is_pair)], 1)
        unasked = torch.full(stored.shape[:2], IGNORED)
        return {
            "input_ids": torch.cat([stored, queried], 1),
            "shift_labels": torch.cat([unasked, values.gather(1, queried_pairs).where(is_query, IGNORED)], 1),
        }

    def _overwritten(self, generator: torch.Generator, keys: Tensor, values: Tensor, is_pair: Tensor) -> Tensor:
        """The pairs [rows, pairs or none, ·] with other values than those that are asked."""
        if not self.overwritten:
            return self._tokens(keys[:, :0], values[:, :0])
        other = torch.randint(1, self.keys, values.shape, generator=generator)
        earlier = self.keys + (values - self.keys + other) % self.keys
        return self._tokens(keys, earlier).where(is_pair[..., None], EMPTY)

    def _distracted(self, generator: torch.Generator, stored: Tensor, is_pair: Tensor) -> Tensor:
        """The pairs [rows, pairs, ·] with distractors at random places between them. Empty positions come first."""
        if not self.distractors:
            return stored
        is_distractor = is_pair.repeat_interleave(self.distractors, 1)
        keys, values = (
            torch.randint(first * self.keys, (first + 1) * self.keys, is_distractor.shape, generator=generator)
            for first in (2, 1)
        )
        every = torch.cat([stored, self._tokens(keys, values).where(is_distractor[..., None], EMPTY)], 1)
        place = torch.rand(every.shape[:2], generator=generator).where(torch.cat([is_pair, is_distractor], 1), -1)
        place[:, : self.pairs] = place[:, : self.pairs].sort(1).values  # the pairs keep their order
        order = place.argsort(1)
        return every.gather(1, order[..., None].expand_as(every))

    def _tokens(self, keys: Tensor, values: Tensor) -> Tensor:
        """The channels [..., 2], with clusters [..., 3], of keys and values [...]."""
        if self.clusters is None:
            return torch.stack([keys, values], -1)
        size = self.keys // self.clusters
        return torch.stack([keys // size, self.clusters + keys % size, values], -1)

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Rows of one number of pairs each, from `least` to `pairs`; a longer row would need keys that were not in the
        training vocabulary."""
        if self.least is None:
            return {}
        numbers = {self.least + (self.pairs - self.least) * i // (TESTED - 1) for i in range(TESTED)}
        tasks = (replace(self, pairs=n, least=None) for n in sorted(numbers))
        return {task.length: task.held_out(rows) for task in tasks}
