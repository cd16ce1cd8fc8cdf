"""The protocol of tasks, their metrics, and a data set of rows drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..ops.loss import IGNORED

LONGER = (1, 2, 4, 8)  # held-out lengths as multiples of the training length
BLOCK = 1024  # rows drawn together

Batch = dict[str, Tensor]


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
    def asked(self) -> Tensor:
        """Mask [rows, T] of the positions with a label."""
        return self.rows["shift_labels"] != IGNORED

    @property
    def loss(self) -> float:
        return self.losses[self.asked].double().mean().item()

    @property
    def accuracy(self) -> float:
        return self.right[self.asked].float().mean().item()

    @property
    def exact(self) -> float:
        """The fraction of rows without a mistake."""
        return (self.right | ~self.asked).all(1).float().mean().item()


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

    def sample(self, generator: torch.Generator, rows: int) -> Batch: ...

    def held_out(self, rows: int) -> Batch:
        """At most `rows` held-out rows, the same for every seed and mixer."""

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Length -> held-out rows of that length, which may exceed the training length; empty for tasks that are not
        evaluated by length."""

    def scores(self, answers: Answers) -> dict[str, float]:
        """Name -> score; the names include `metric.name`."""


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


class Drawn(ByToken):
    """Base of synthetic tasks, whose rows are drawn from a random generator."""

    length: Any  # int
    sample: Any

    def resized(self, length: int) -> Any:
        return replace(self, length=length)  # type: ignore[type-var]

    def held_out(self, rows: int) -> Batch:
        return held_out(self.sample, rows)

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Held-out rows at LONGER multiples of the training length."""
        return {times * self.length: self.resized(times * self.length).held_out(rows) for times in LONGER}


class Rows(Dataset):
    """A data set of `count` rows that depend on the seed and their index only.

    Rows are drawn in blocks of BLOCK, so memory does not grow with `count` and sequential access is cheap.
    """

    def __init__(self, sample: Callable[[torch.Generator, int], Batch], seed: int, count: int):
        self.sample, self.seed, self.count = sample, seed, count
        self.number: int | None = None
        self.block: Batch = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self.count:  # what ends a loop over the rows
            raise IndexError(f"row {index} of {self.count}")
        number, row = divmod(index, BLOCK)
        if number != self.number:
            self.number, self.block = number, self.sample(generator(self.seed, number), BLOCK)
        return {name: values[row] for name, values in self.block.items()}


def held_out(sample: Callable[[torch.Generator, int], Batch], rows: int) -> Batch:
    """Held-out rows of a synthetic task, drawn with a key that no training seed has."""
    return sample(generator(), rows)


def generator(*key: int) -> torch.Generator:
    """A random generator for a key. The key is hashed, because torch uses only the lower 32 bits of a seed."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
