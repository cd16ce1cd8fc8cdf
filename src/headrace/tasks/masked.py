"""BERT's two questions about a text (arXiv 1810.04805, section 3.1): what stood in the gaps, and do two pieces belong
together?

    input      [CLS] T h e _ c [SEP] a t [MASK] s q t [SEP]
    answer                                 _      a            and: the second piece follows the first
    segment      0   0 0 0 0 0   0   1 1   1    1 1 1   1

15 % of a row's tokens are asked for: of them 80 % are masked, 10 % replaced by a random token, and 10 % stay. In half
of the rows the second piece is from elsewhere. Rows are full: pieces differ in length, their sum does not.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, ByToken, held_out
from .text import Text

ASKED, MASKED, RANDOM = 0.15, 0.8, 0.1  # shares: of the tokens, and of those asked for
CLS, SEP, MASK = range(3)  # after the text's own tokens
SHORTEST = 8


@dataclass(frozen=True)
class Masked(ByToken, Text):
    name: ClassVar[str] = "masked"

    def __post_init__(self) -> None:
        if self.length < SHORTEST:
            raise InputError(f"length={self.length}; expected at least {SHORTEST}, three of them special tokens")

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size + 3

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        return self._pairs(self.corpus.train, generator, rows)

    def held_out(self, rows: int) -> Batch:
        return held_out(partial(self._pairs, self.corpus.tail), rows)

    def _pairs(self, tokens: Tensor, generator: torch.Generator, rows: int) -> Batch:
        n, special, draw = self.length - 3, self.corpus.vocab_size, partial(torch.randint, generator=generator)
        start, elsewhere = draw(len(tokens) - n + 1, (2, rows, 1))
        apart, first = draw(2, (rows, 1)), draw(n // 4, n - n // 4 + 1, (rows, 1))  # first: length of the first piece
        place = torch.arange(n)
        second = place >= first
        pieces = tokens[torch.where(second & (apart == 1), elsewhere, start) + place].long()
        ids = torch.full((rows, self.length), special + SEP)
        ids[:, 0] = special + CLS
        ids = ids.scatter(1, 1 + place + second, pieces)
        masked, labels = mask(ids, special, special + MASK, generator)
        segments = (torch.arange(self.length) > first + 1).long()
        answers = {"shift_labels": labels, "next_sentence_label": apart[:, 0]}
        return {"input_ids": masked, "token_type_ids": segments, **answers}


def mask(ids: Tensor, ordinary: int, mask_id: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """ids [rows, T] with gaps, and labels [rows, T]: what stood there. Ids below `ordinary` are asked for, and replace
    others; each row has as many questions as the one with the fewest such ids."""
    eligible = ids < ordinary
    count = max(round(ASKED * int(eligible.sum(1).min())), 1)
    order = torch.rand(ids.shape, generator=generator).masked_fill(~eligible, 1.0).argsort(1)
    asked = torch.zeros_like(eligible).scatter(1, order[:, :count], True)
    fate, other = torch.rand(ids.shape, generator=generator), torch.randint(ordinary, ids.shape, generator=generator)
    changed = torch.where(fate < MASKED, mask_id, torch.where(fate < MASKED + RANDOM, other, ids))
    return torch.where(asked, changed, ids), ids.masked_fill(~asked, IGNORED)
