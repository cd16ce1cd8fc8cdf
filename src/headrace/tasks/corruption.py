"""Text of which some tokens are hidden, which a model is to find: for encoders and encoder-decoders."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.loss import IGNORED
from .base import Batch, ByToken
from .sequences import END, FIRST, START, Sequences
from .text import Text, read

ASKED, MASKED, RANDOM = 0.15, 0.8, 0.1  # fraction of predicted tokens; fractions of these that are masked, replaced
CLS, SEP, MASK = range(3)  # ids of special tokens, after those of the text
TAKEN, SPAN = 0.15, 3  # fraction of removed tokens; mean number of tokens in a span


@dataclass(frozen=True)
class Masked(ByToken, Text):
    """Masked language modelling and next-sentence prediction, as in BERT (arXiv 1810.04805, section 3.1).

        input      [CLS] T h e _ c [SEP] a t [MASK] s q t [SEP]
        answer                                 _      a            and: the second piece follows the first
        segment      0   0 0 0 0 0   0   1 1   1    1 1 1   1

    15 % of the tokens of a row are predicted: 80 % of these are masked, 10 % are replaced by a random token, and 10 %
    are left unchanged. In half of the rows the second segment is from another place in the text. Segments vary in
    length, but their sum does not, so that rows have no padding.
    """

    name: ClassVar[str] = "masked"
    shortest: ClassVar[int] = 8  # three of them are special tokens

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size + 3

    @property
    def window(self) -> int:
        return self.length - 3

    def made(self, rows: Any, numbers: Tensor, generator: torch.Generator) -> Batch:
        """The second segment of half of the rows is from another row of the text."""
        n, special, draw = self.window, self.corpus.vocab_size, partial(torch.randint, generator=generator)
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


@dataclass(frozen=True)
class Spans(ByToken, Text, Sequences):
    """Span corruption, as in T5 (arXiv 1910.10683, section 3.1.4).

        text     T h a n k _ y o u _ f o r _ c o m i n g _ t o _ m y _ p a r t y _ t o n i g h t
        source   T h a n k _ y o u _ f <0> _ c o m i n g _ t o _ m y _ p a r t y _ t o n <1>
        target   <0> o r <1> i g h t end

    15 % of the tokens are removed in spans of three tokens on average, and each span is replaced by a sentinel token.
    As in T5, a row begins with kept tokens and ends with a span.
    """

    name: ClassVar[str] = "spans"
    shortest: ClassVar[int] = 8

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
        return FIRST + self.corpus.vocab_size

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
