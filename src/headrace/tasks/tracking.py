"""Tasks of state tracking: a state that every token changes has to be known all along. They tell mixers apart by what
their recurrence can express, where tasks of recall measure how much it stores (https://arxiv.org/abs/2404.08819,
https://arxiv.org/abs/2411.12537).

The first tokens of a row decide its part. Of rows of PREFIX tokens or more, of whatever length, those held out begin
like no training row, so that no answer after these tokens can be remembered from training.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from ..utils.errors import InputError, require
from .base import Batch, Drawn

PREFIX = 16  # number of first tokens that decide the part of a row


class ByPrefix(Drawn):
    """Base of tasks whose rows are parted by their first tokens."""

    def content(self, drawn: Batch) -> Tensor:
        return drawn["input_ids"][:, :PREFIX]


class Automaton(ByPrefix):
    """Base of tasks whose tokens are drawn uniformly and change the state of an automaton that begins in state 0. The
    answer at each position is the state after its token."""

    transitions: Any  # Tensor: the state after a token [states, tokens]

    def __post_init__(self) -> None:
        require(self.length >= 1, f"{self}; expected a length of at least 1")

    @property
    def vocab_size(self) -> int:
        return max(self.transitions.shape)

    @property
    def chance(self) -> float:
        return 1 / len(self.transitions)

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        after = self.transitions
        ids = torch.randint(after.shape[1], (rows, self.length), generator=generator)
        states = [torch.zeros(rows, dtype=torch.long)]
        for tokens in ids.unbind(1):
            states.append(after[states[-1], tokens])
        return {"input_ids": ids, "shift_labels": torch.stack(states[1:], 1)}


def addition(modulus: int) -> Tensor:
    """(a + b) mod `modulus` [a, b]."""
    numbers = torch.arange(modulus)
    return (numbers[:, None] + numbers) % modulus


@lru_cache(maxsize=8)
def composition(points: int, moved: int) -> Tensor:
    """The permutation that is a permutation followed by one that moves at most `moved` points [permutations, those].
    Permutations are numbered in lexicographic order, from the identity."""
    group = list(permutations(range(points)))
    number = {element: i for i, element in enumerate(group)}
    tokens = [g for g in group if sum(g[i] != i for i in range(points)) <= moved]
    return torch.tensor([[number[tuple(g[i] for i in state)] for g in tokens] for state in group])


@dataclass(frozen=True)
class Parity(Automaton):
    """Whether the number of ones so far is odd.

        input      1  0  1  1  0
        answer     1  1  0  1  1

    A linear recurrence whose matrices have eigenvalues from 0 to 1 only cannot do this at every length; one with
    negative eigenvalues can (https://arxiv.org/abs/2411.12537).
    """

    length: int = 32

    name: ClassVar[str] = "parity"
    transitions = addition(2)


@dataclass(frozen=True)
class ModularCounting(Automaton):
    """The sum so far modulo m, of numbers below m.

        input      3  4  0  1  4        with m = 5
        answer     3  2  2  3  2

    The states form a cycle. A product of reflections turns the memory along it, a single one cannot for m above 2.
    """

    modulus: int = 5
    length: int = 32

    name: ClassVar[str] = "modular-counting"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.modulus >= 2, f"{self}; expected a modulus of at least 2")

    @property
    def transitions(self) -> Tensor:  # type: ignore[override]
        return addition(self.modulus)


class Permutations(Automaton):
    """Base of the word problems of the groups of all permutations of some points."""

    points: ClassVar[int]
    moved: Any  # int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(2 <= self.moved <= self.points, f"{self}; expected moved from 2 to {self.points}, the number of points")

    @property
    def transitions(self) -> Tensor:  # type: ignore[override]
        return composition(self.points, self.moved)


@dataclass(frozen=True)
class S3(Permutations):
    """The word problem of S3: the product so far of permutations of three points.

        input      021  102  120  210
        answer     021  120  201  021        the first, then the second: the place of each point after both

    The six permutations are tokens. Their order matters, but the group is solvable.
    """

    length: int = 32
    moved: int = 3  # largest number of points that a token moves; 2: swaps and the identity

    name: ClassVar[str] = "s3"
    points: ClassVar[int] = 3


@dataclass(frozen=True)
class S5(Permutations):
    """The word problem of S5: the product so far of permutations of five points.

        input      10234  01243  21034
        answer     10234  10243  12043

    The group is not solvable, so the problem is complete for NC¹: no transformer and no diagonal recurrence with a
    bounded number of layers solves it at every length, if TC⁰ is smaller than NC¹ (https://arxiv.org/abs/2404.08819).
    """

    length: int = 16
    moved: int = 5  # largest number of points that a token moves; 2: swaps and the identity

    name: ClassVar[str] = "s5"
    points: ClassVar[int] = 5


WRITE, IGNORE, READ = 2, 3, 4  # after the bits


@dataclass(frozen=True)
class FlipFlop(ByPrefix):
    """The flip-flop language (https://arxiv.org/abs/2306.00946): reading the bit that was written last.

        input      w  1  i  0  r  1  i  1  w  0  r  0        w: write, i: ignore, r: read
        answer                 1                 0

    Every instruction is followed by a bit. The first one writes, the last one reads, and the others are drawn.
    """

    length: int = 64
    ignored: float = 0.8  # probability of an instruction to ignore; those to write and to read share the rest

    name: ClassVar[str] = "flip-flop"
    vocab_size: ClassVar[int] = 5
    chance: ClassVar[float] = 1 / 2

    def __post_init__(self) -> None:
        if self.length < 4 or self.length % 2 or not 0 <= self.ignored <= 1:
            raise InputError(f"{self}; expected an even length of at least 4, and ignored from 0 to 1")

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        shape = rows, self.length // 2
        instructions = torch.full(shape, IGNORE)
        drawn = torch.rand(shape, generator=generator)
        instructions[drawn >= self.ignored] = WRITE
        instructions[drawn >= (1 + self.ignored) / 2] = READ
        instructions[:, 0], instructions[:, -1] = WRITE, READ
        bits = torch.randint(2, shape, generator=generator)
        written_at = torch.arange(shape[1]).where(instructions == WRITE, 0).cummax(1).values
        stored = bits.gather(1, written_at)
        reads = instructions == READ
        answers = torch.stack([stored.where(reads, IGNORED), torch.full(shape, IGNORED)], 2)
        ids = torch.stack([instructions, stored.where(reads, bits)], 2)
        return {"input_ids": ids.flatten(1), "shift_labels": answers.flatten(1)}


@dataclass(frozen=True)
class Dyck(ByPrefix):
    """The Dyck language of nested brackets: after each closing bracket, the one that may close next.

        input      (  [  ]  (  )  )  [  ]
        answer           )     )  .     .        .: none, as nothing is open

    The grammar is S → ε | ( S ) S | [ S ] S, and a row is the beginning of a word. With the opening brackets, which may
    always follow, the answer is the set of tokens that may come next. A model needs a stack.
    """

    kinds: int = 2  # number of kinds of brackets
    length: int = 64

    name: ClassVar[str] = "dyck"

    def __post_init__(self) -> None:
        require(self.kinds >= 1 and self.length >= 2, f"{self}; expected at least 1 kind and a length of at least 2")

    @property
    def vocab_size(self) -> int:
        return 2 * self.kinds + 1

    @property
    def chance(self) -> float:
        return 1 / (self.kinds + 1)

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        opened = torch.randint(self.kinds, (rows, self.length), generator=generator)
        closes = torch.rand(rows, self.length, generator=generator) < 0.5
        closes[:, -1] = True  # unless nothing is open, which takes a closing bracket before: a row has an answer
        stack = torch.full((rows, self.length + 1), self.kinds)  # the kinds that are open, above a mark
        row, depth = torch.arange(rows), torch.zeros(rows, dtype=torch.long)
        ids, labels = [], []
        for kind, may_close in zip(opened.unbind(1), closes.unbind(1), strict=True):
            shuts = may_close & (depth > 0)
            ids.append(torch.where(shuts, self.kinds + stack[row, depth], kind))
            depth = torch.where(shuts, depth - 1, depth + 1)
            stack[row, depth] = stack[row, depth].where(shuts, kind)
            labels.append((self.kinds + stack[row, depth]).where(shuts, IGNORED))
        return {"input_ids": torch.stack(ids, 1), "shift_labels": torch.stack(labels, 1)}
