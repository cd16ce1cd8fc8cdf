"""What tasks from sequence to sequence share: pairs of texts, a source and the target that answers it, as characters.

Their rows are {"input_ids": [rows, L], "attention_mask": [rows, L], "shift_labels": [rows, T]}, filled up at the end.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from .base import Batch, ByRow, held_out

START, END, FIRST = 0, 1, 2  # before a target and where a source has ended; after a target; the first character


class Sequences(ByRow):
    """A row is right where all of its target is, each character predicted after the true ones before it: greedy
    decoding writes just these rows without a mistake."""

    alphabet: Any  # a string
    length: Any  # int, of the longest source
    written: Any  # int, length of the longest target

    @property
    def vocab_size(self) -> int:
        return FIRST + len(self.alphabet)

    def pairs(self, generator: torch.Generator, rows: int) -> Iterable[tuple[str, str]]:
        raise TypeError(f"{type(self).__name__} does not say what its pairs are")

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        sources, targets = zip(*self.pairs(generator, rows), strict=True)
        ids = torch.full((rows, self.length), START)
        labels = torch.full((rows, self.written + 1), IGNORED)
        for i, (source, target) in enumerate(zip(map(self.tokens, sources), map(self.tokens, targets), strict=True)):
            ids[i, : len(source)] = torch.tensor(source)
            labels[i, : len(target) + 1] = torch.tensor([*target, END])
        return {"input_ids": ids, "attention_mask": ids != START, "shift_labels": labels}

    def tokens(self, text: str) -> list[int]:
        return [FIRST + self.alphabet.index(character) for character in text]

    def text(self, ids: Tensor) -> list[str]:
        """A string per token that is not filling."""
        return [self.alphabet[i - FIRST] if i >= FIRST else "end" for i in ids.tolist() if i > START]

    def held_out(self, rows: int) -> Batch:
        return held_out(self.sample, rows)

    def by_length(self, rows: int) -> dict[int, Batch]:
        return {}
