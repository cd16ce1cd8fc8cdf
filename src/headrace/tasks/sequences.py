"""The base of sequence-to-sequence tasks: pairs of a source text and a target text, with characters as tokens.

Rows are {"input_ids": [rows, L], "attention_mask": [rows, L], "shift_labels": [rows, T]}, padded at the end.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from .base import Batch, ByRow, SplitByContent

START, END, FIRST = 0, 1, 2  # start of a target and padding of a source; end of a target; first character


class Sequences(SplitByContent, ByRow):
    """Base of sequence-to-sequence tasks. A row is correct if every target character is predicted correctly given the
    true characters before it, which holds exactly if greedy decoding gives the target."""

    alphabet: Any  # str
    length: Any  # int: length of the longest source
    written: Any  # int: length of the longest target

    @property
    def vocab_size(self) -> int:
        return FIRST + len(self.alphabet)

    def pairs(self, generator: torch.Generator, rows: int) -> Iterable[tuple[str, str]]:
        raise TypeError(f"{type(self).__name__} does not define pairs()")

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        sources, targets = zip(*self.pairs(generator, rows), strict=True)
        ids = torch.full((rows, self.length), START)
        labels = torch.full((rows, self.written + 1), IGNORED)
        for i, (source, target) in enumerate(zip(map(self.tokens, sources), map(self.tokens, targets), strict=True)):
            ids[i, : len(source)] = torch.tensor(source)
            labels[i, : len(target) + 1] = torch.tensor([*target, END])
        return {"input_ids": ids, "attention_mask": ids != START, "shift_labels": labels}

    def content(self, drawn: Batch) -> Tensor:
        """The source: of its length alone, so that a source is of one part in rows of every length."""
        return drawn["input_ids"].masked_fill(~drawn["attention_mask"], IGNORED)

    def tokens(self, text: str) -> list[int]:
        return [FIRST + self.alphabet.index(character) for character in text]

    def text(self, ids: Tensor) -> list[str]:
        """A string for each token that is not padding."""
        return [self.alphabet[i - FIRST] if i >= FIRST else "end" for i in ids.tolist() if i > START]

    def by_length(self, rows: int) -> dict[int, Batch]:
        return {}
