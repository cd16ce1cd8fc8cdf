"""What all tasks share: the protocol, the metric, and a data set that is drawn from a seed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

LONGER = (1, 2, 4, 8)  # times the length of training: where a task is tested besides
BLOCK = 1024  # rows drawn at once

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Metric:
    """How a task is scored and how the score is printed: `scale` times the number, `digits` decimals, `unit`."""

    name: str
    unit: str
    scale: float = 1.0
    digits: int = 1
    higher_is_better: bool = True
    solved: float | None = None  # a score from here on leaves nothing to compare


class Answers(NamedTuple):
    """What a model said: its mean loss in nats, and [rows, T] where it was asked and where it was right."""

    loss: float
    asked: Tensor
    right: Tensor

    @property
    def accuracy(self) -> float:
        return float(self.right.sum() / self.asked.sum())

    @property
    def exact(self) -> float:
        """The share of rows without a mistake."""
        return float((self.right == self.asked).all(1).float().mean())


class Task(Protocol):
    """A source of rows {"input_ids": [rows, T] or [rows, T, channels], "shift_labels": [rows, T]}.

    The embeddings of a position's channels are summed; a negative id adds nothing. `shift_labels` stand at the position
    that answers; IGNORED marks a position without a question. Tasks from sequence to sequence: see sequences.py.
    """

    name: ClassVar[str]
    metric: ClassVar[Metric]

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int:
        """Positions in a row."""

    def resized(self, length: int) -> "Task":
        """The same task at another length; InputError where that cannot be."""

    def sample(self, generator: torch.Generator, rows: int) -> Batch: ...

    def held_out(self, rows: int) -> Batch:
        """The same rows for every seed and every mixer, at most `rows` of them."""

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Held-out rows of single lengths, beyond that of training too; none where length is not what is asked."""

    def scores(self, answers: Answers) -> dict[str, float]:
        """Scores by name, `metric.name` among them."""


class ByToken:
    """Each answer counts."""

    metric: ClassVar[Metric] = Metric("accuracy", "%", 100.0, solved=0.99)

    def scores(self, answers: Answers) -> dict[str, float]:
        return {"accuracy": answers.accuracy, "loss": answers.loss}


class ByRow:
    """A row is right where all of its answers are."""

    metric: ClassVar[Metric] = Metric("exact match", "%", 100.0, solved=0.99)

    def scores(self, answers: Answers) -> dict[str, float]:
        return {"exact match": answers.exact, "accuracy": answers.accuracy, "loss": answers.loss}


class Drawn(ByToken):
    """What tasks share whose rows are drawn from nothing but a generator."""

    length: Any  # int
    sample: Any

    def resized(self, length: int) -> Any:
        return replace(self, length=length)  # type: ignore[type-var]

    def held_out(self, rows: int) -> Batch:
        return held_out(self.sample, rows)

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Held-out rows as long as those of training, and longer."""
        return {times * self.length: self.resized(times * self.length).held_out(rows) for times in LONGER}


class Rows(Dataset):
    """`count` rows that depend on nothing but the seed: row i is the same whatever was read before.

    Rows are drawn in blocks, so that a long run needs no more memory than a short one and reads in order are cheap.
    """

    def __init__(self, sample: Callable[[torch.Generator, int], Batch], seed: int, count: int):
        self.sample, self.seed, self.count = sample, seed, count
        self.number: int | None = None
        self.block: Batch = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        number, row = divmod(index, BLOCK)
        if number != self.number:
            self.number, self.block = number, self.sample(generator(self.seed, number), BLOCK)
        return {name: values[row] for name, values in self.block.items()}


def held_out(sample: Callable[[torch.Generator, int], Batch], rows: int) -> Batch:
    """Rows of a synthetic task that no training seed draws."""
    return sample(generator(), rows)


def generator(*key: int) -> torch.Generator:
    """A generator of its own for every key, which is hashed: torch keeps the lower 32 bits of a seed alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
