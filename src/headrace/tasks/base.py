"""The protocol of tasks, their metrics, the parts of their rows, and a data set of rows drawn from a seed.

A row belongs to one of three parts: it is for training, for tuning a recipe, or held out. Rows that are drawn at
random are parted by a hash of their content, so that no row of one part is ever drawn for another.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..ops.loss import IGNORED
from ..utils.errors import InputError

LONGER = (1, 2, 4, 8)  # held-out lengths as multiples of the training length
BLOCK = 1024  # rows drawn together

Batch = dict[str, Tensor]
Part = Literal["training", "tuning", "held-out"]
PARTS = np.array(["held-out", "tuning", *["training"] * 8])  # the part of a row by its hash modulo 10
MAX_FRUITLESS = 500  # rows drawn without a new one of a part after which there are no more; of a tenth: once in 10^23


@dataclass(frozen=True)
class Metric:
    """The metric of a task. A score is printed as `scale` times its value with `digits` decimals and `unit`."""

    name: str
    unit: str
    scale: float = 1.0
    digits: int = 1
    higher_is_better: bool = True
    solved: float | None = None  # score from which on the task counts as solved

    @property
    def axis(self) -> str:
        """The label of an axis of scores."""
        return f"held-out {self.name} ({self.unit})"


class Answers(NamedTuple):
    """The answers of a model to rows of a task. losses: [rows, T] in nats; right: mask [rows, T] of the positions where
    the likeliest token is the label."""

    rows: Batch
    losses: Tensor
    right: Tensor

    @property
    def labelled(self) -> Tensor:
        """Mask [rows, T] of the positions with a label."""
        return self.rows["shift_labels"] != IGNORED

    @property
    def loss(self) -> float:
        return self.losses[self.labelled].double().mean().item()

    @property
    def accuracy(self) -> float:
        return self.right[self.labelled].float().mean().item()

    @property
    def exact(self) -> float:
        """The fraction of rows without a mistake."""
        return (self.right | ~self.labelled).all(1).float().mean().item()


class Task(Protocol):
    """A source of rows {"input_ids": [rows, T] or [rows, T, channels], "shift_labels": [rows, T]}.

    The embeddings of the channels of a position are summed; a negative id adds nothing. `shift_labels` are the labels
    of the outputs at the same position; IGNORED marks a position without a label. For sequence-to-sequence tasks, see
    sequences.py.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric]

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int:
        """Number of positions in a row."""

    def resized(self, length: int) -> "Task":
        """The same task at another length. InputError for a length that the task cannot have."""

    def training(self, seed: int, count: int) -> "Rows":
        """The first `count` training rows of a seed."""

    def held_out(self, rows: int, part: Part = "held-out") -> Batch:
        """At most `rows` different rows of a part that is not trained on, the same for every seed and mixer."""

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Length -> held-out rows of that length, which may exceed the training length; empty for tasks that are not
        evaluated by length."""

    def scores(self, answers: Answers) -> dict[str, float]:
        """Name -> score; the names include `metric.name`."""

    def __hash__(self) -> int: ...


class ByToken:
    """Scores of a task by token: accuracy over all positions with a label."""

    metric: ClassVar[Metric] = Metric("accuracy", "%", 100.0, solved=0.99)

    def scores(self, answers: Answers) -> dict[str, float]:
        return {"accuracy": answers.accuracy, "loss": answers.loss}


class ByRow:
    """Scores of a task by row: a row is correct if all its answers are."""

    metric: ClassVar[Metric] = Metric("exact match", "%", 100.0, solved=0.99)

    def scores(self, answers: Answers) -> dict[str, float]:
        return {"exact match": answers.exact, "accuracy": answers.accuracy, "loss": answers.loss}


class Sampled:
    """Base of tasks whose training rows are drawn, each independently of the others, by `sample`."""

    sample: Any  # (generator, rows) -> Batch

    def training(self, seed: int, count: int) -> "Rows":
        return Rows(lambda number: self.sample(generator("training", seed, number), BLOCK), count)

    def by_length(self, rows: int) -> dict[int, Batch]:
        return {}


class SplitByContent(Sampled):
    """Base of tasks whose rows are drawn from a random generator and parted by their content.

    Of a row drawn by `draw`, `content` decides the part, and `complete` makes what `sample` returns.
    """

    draw: Any  # (generator, rows) -> Batch

    def content(self, drawn: Batch) -> Tensor:
        """Integers [rows, ...] that decide the part of a row; negative ones do not count."""
        return drawn["input_ids"]

    def complete(self, drawn: Batch) -> Batch:
        return drawn

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        return self.rows_of("training", generator, rows)

    def held_out(self, rows: int, part: Part = "held-out") -> Batch:
        return self.rows_of(part, generator(part), rows)

    def rows_of(self, part: Part, generator: torch.Generator, rows: int) -> Batch:
        """Rows of a part. A training row may be drawn twice; of other parts the rows differ, and may be fewer than
        `rows`. InputError if the task has too few different rows for all parts."""
        share, missing, fruitless = float(np.mean(part == PARTS)), rows, 0
        batches: list[Batch] = []
        seen = np.empty(0, np.uint64)
        while not batches or (missing and fruitless < MAX_FRUITLESS):
            drawn = self.draw(generator, math.ceil(missing / share))
            hashes = row_hashes(self.content(drawn))
            mine = np.flatnonzero(PARTS[hashes % np.uint64(len(PARTS))] == part)
            if part != "training":
                mine = mine[np.sort(np.unique(hashes[mine], return_index=True)[1])]
                mine = mine[~np.isin(hashes[mine], seen)]
                seen = np.concatenate([seen, hashes[mine]])
            mine = mine[:missing]
            batches.append({name: values[mine] for name, values in drawn.items()})
            missing, fruitless = missing - len(mine), 0 if len(mine) else fruitless + len(hashes)
        if missing == rows > 0:
            raise InputError(
                f"{self} has too few different rows to hold some out: of {fruitless} that were drawn, none is of the "
                f"part {part!r}; expected a task with more, such as longer rows or more symbols"
            )
        return self.complete({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})


class Drawn(SplitByContent, ByToken):
    """Base of synthetic tasks for causal models."""

    length: Any  # int

    def resized(self, length: int) -> Any:
        return replace(self, length=length)  # type: ignore[type-var]

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Held-out rows at LONGER multiples of the training length."""
        return {times * self.length: self.resized(times * self.length).held_out(rows) for times in LONGER}


class OfSymbols(Drawn):
    """Base of synthetic tasks whose answers are symbols."""

    symbols: Any  # int
    marks = 1  # number of tokens beside the symbols

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    @property
    def vocab_size(self) -> int:
        return self.symbols + self.marks


class Rows(Dataset):
    """A data set of `count` rows, made in blocks of BLOCK rows, so that memory does not grow with `count` and
    sequential access is cheap. block: of its number."""

    def __init__(self, block: Callable[[int], Batch], count: int):
        self.make, self.count = block, count
        self.number: int | None = None
        self.block: Batch = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self.count:  # what ends a loop over the rows
            raise IndexError(f"row {index} of {self.count}")
        number, row = divmod(index, BLOCK)
        if number != self.number:
            self.number, self.block = number, self.make(number)
        return {name: values[row] for name, values in self.block.items()}


def row_hashes(content: Tensor) -> np.ndarray:
    """A hash [rows] of 64 bits of the numbers of each row of integers [rows, ...] in their order, without the negative
    ones: padding does not change it."""
    numbers = content.flatten(1).numpy()
    counted = numbers >= 0
    places = counted.cumsum(1).astype(np.uint64)
    mixed = splitmix64(splitmix64(places) + numbers.astype(np.uint64)) * counted
    return splitmix64(mixed.sum(1, dtype=np.uint64))


def splitmix64(x: np.ndarray) -> np.ndarray:
    """A permutation of the 64-bit integers (uint64) whose values look random, by SplitMix64's mixing of bits (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def generator(purpose: str, *key: int) -> torch.Generator:
    """A random generator for a purpose and integers. No two keys are hashed alike, as a hash of the integers alone
    would do with (0,) and (0, 0). The hash has 32 bits, as torch uses no more of a seed."""
    digest = hashlib.sha256(repr((purpose, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
