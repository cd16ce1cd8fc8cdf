"""Masked language modelling and next-sentence prediction, as in BERT (arXiv 1810.04805, section 3.1).

    input      [CLS] T h e _ c [SEP] a t [MASK] s q t [SEP]
    answer                                 _      a            and: the second piece follows the first
    segment      0   0 0 0 0 0   0   1 1   1    1 1 1   1

15 % of the tokens of a row are predicted: 80 % of these are masked, 10 % are replaced by a random token, and 10 % are
left unchanged. In half of the rows the second segment is from another place in the text. Segments vary in length, but
their sum does not, so that rows have no padding.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, ByToken
from .text import Text, read

ASKED, MASKED, RANDOM = 0.15, 0.8, 0.1  # fraction of predicted tokens; fractions of these that are masked, replaced
CLS, SEP, MASK = range(3)  # ids of special tokens, after those of the text
SHORTEST = 8


@dataclass(frozen=True)
class Masked(ByToken, Text):
    """Masked language modelling with next-sentence prediction."""

    name: ClassVar[str] = "masked"

    def __post_init__(self) -> None:
        if self.length < SHORTEST:
            raise InputError(f"length={self.length}; expected at least {SHORTEST}, three of them special tokens")

    @property
    def vocab_size(self) -> int:
        return len(self.corpus.tokenizer) + 3

    @property
    def window(self) -> int:
        return self.length - 3

    def made(self, rows: Any, numbers: Tensor, generator: torch.Generator) -> Batch:
        """The second segment of half of the rows is from another row of the text."""
        n, special, draw = self.window, len(self.corpus.tokenizer), partial(torch.randint, generator=generator)
        count = len(numbers)
        others = (numbers + draw(1, max(len(rows), 2), (count,))) % len(rows)
        unrelated, first = draw(2, (count, 1)), draw(n // 4, n - n // 4 + 1, (count, 1))  # first: length of a piece
        place = torch.arange(n)
        second = place >= first
        pieces = torch.where(second & (unrelated == 1), read(rows, others), read(rows, numbers))
        ids = torch.full((count, self.length), special + SEP)
        ids[:, 0] = special + CLS
        ids = ids.scatter(1, 1 + place + second, pieces)
        masked, labels = mask(ids, special, special + MASK, generator)
        segments = (torch.arange(self.length) > first + 1).long()
        answers = {"shift_labels": labels, "next_sentence_label": unrelated[:, 0]}
        return {"input_ids": masked, "token_type_ids": segments, **answers}


def mask(ids: Tensor, ordinary: int, mask_id: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(masked ids [rows, T], labels [rows, T]). Ids below `ordinary` can be predicted and can replace others. All rows
    have equally many labels, by the row with the fewest such ids."""
    eligible = ids < ordinary
    count = max(round(ASKED * int(eligible.sum(1).min())), 1)
    order = torch.rand(ids.shape, generator=generator).masked_fill(~eligible, 1.0).argsort(1)
    predicted = torch.zeros_like(eligible).scatter(1, order[:, :count], True)
    fate, other = torch.rand(ids.shape, generator=generator), torch.randint(ordinary, ids.shape, generator=generator)
    changed = torch.where(fate < MASKED, mask_id, torch.where(fate < MASKED + RANDOM, other, ids))
    return torch.where(predicted, changed, ids), ids.masked_fill(~predicted, IGNORED)
