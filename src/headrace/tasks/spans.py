"""Span corruption, as in T5 (arXiv 1910.10683, section 3.1.4).

    text     T h a n k _ y o u _ f o r _ c o m i n g _ t o _ m y _ p a r t y _ t o n i g h t
    source   T h a n k _ y o u _ f <0> _ c o m i n g _ t o _ m y _ p a r t y _ t o n <1>
    target   <0> o r <1> i g h t end

15 % of the tokens are removed in spans of three tokens on average, and each span is replaced by a sentinel token. As in
T5, a row begins with kept tokens and ends with a span.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..utils.errors import InputError
from .base import Batch, ByToken
from .sequences import END, FIRST, START, Sequences
from .text import Text, read

TAKEN, SPAN = 0.15, 3  # fraction of removed tokens; mean number of tokens in a span
SHORTEST = 8


@dataclass(frozen=True)
class Spans(ByToken, Text, Sequences):
    """Span corruption."""

    name: ClassVar[str] = "spans"

    def __post_init__(self) -> None:
        if self.length < SHORTEST:
            raise InputError(f"length={self.length}; expected at least {SHORTEST}")

    @property
    def taken(self) -> int:
        return max(round(TAKEN * self.length), 1)

    @property
    def spans(self) -> int:
        return max(round(self.taken / SPAN), 1)

    @property
    def vocab_size(self) -> int:
        return self.marks + self.spans

    @property
    def marks(self) -> int:
        """The first sentinel."""
        return FIRST + len(self.corpus.tokenizer)

    def made(self, rows: Any, numbers: Tensor, generator: torch.Generator) -> Batch:
        text, count = FIRST + read(rows, numbers), len(numbers)
        kept = parts(self.length - self.taken, self.spans, count, generator)
        ends = torch.stack([kept, parts(self.taken, self.spans, count, generator)], 2).flatten(1).cumsum(1)
        stretch = (torch.arange(self.length)[:, None] >= ends[:, None]).sum(2)  # kept, taken, kept, taken, …
        gone, mark = stretch % 2 == 1, self.marks + stretch // 2
        first = gone & (stretch.diff(dim=1, prepend=stretch[:, :1]) > 0)
        source = torch.where(gone, mark, text)[~gone | first].view(count, -1)
        target = torch.stack([mark, text], 2)[torch.stack([first, gone], 2)].view(count, -1)
        labels = torch.cat([target, torch.full((count, 1), END)], 1)
        return {
            "input_ids": source,
            "attention_mask": torch.ones_like(source, dtype=torch.bool),
            "shift_labels": labels,
        }

    def text(self, ids: Tensor) -> list[str]:
        """A string for each token that is not padding."""
        marks, decode = self.marks, self.corpus.tokenizer.decode
        shown = [i for i in ids.tolist() if i > START]
        return ["end" if i == END else f"<{i - marks}>" if i >= marks else str(decode([i - FIRST])) for i in shown]


def parts(total: int, count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Positive integers [rows, count] with row sums `total`, drawn uniformly from all such rows."""
    cuts = torch.rand(rows, total - 1, generator=generator).argsort(1)[:, : count - 1].sort(1).values + 1
    ends = torch.cat([cuts, torch.full((rows, 1), total)], 1)
    return ends.diff(dim=1, prepend=torch.zeros(rows, 1, dtype=torch.long))
