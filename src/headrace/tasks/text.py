"""Causal language modelling on text files: each token is predicted from the tokens before it.

    input      T  h  e  _  h  e
    answer     h  e  _  h  e

Rows, tokens and what is held out are those of `headrace prepare`: documents follow each other, each with its end token.
A tenth of the documents is held out and a tenth is for tuning; of fewer than 20 documents, pieces drawn over all of
the text. Rows of these two parts occur in no other part of the text. The default text is the source code of Python's
standard library.
"""

import math
import sysconfig
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, takewhile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..data import Collator, corpus
from ..data.corpus import Corpus
from ..data.parts import left_out
from ..data.rows import ORDER, evenly_spaced, order, shifted
from ..ops.loss import IGNORED
from ..utils.errors import InputError, require
from .base import BLOCK, Answers, Batch, Metric, Part, Rows, generator

COMMON = 1e-5  # a bigram that is more than this share of the training text's is learnt from there, not from the row


@dataclass(frozen=True)
class Text:
    """Causal language modelling on text files."""

    files: tuple[str, ...] = ()  # empty: Python's standard library
    tokenizer: str | None = None  # a file, a folder or a name on the Hub; None: bytes
    length: int = 128
    longest: int = 0  # length up to which the loss is evaluated at 1, 4, 16 … times `length` as well; 0: not

    name: ClassVar[str] = "text"
    metric: ClassVar[Metric] = Metric("loss", "nats/token", digits=3, higher_is_better=False)
    shortest: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require(self.length >= self.shortest, f"length={self.length}; expected at least {self.shortest}")
        if self.longest and self.longest < self.length:
            raise InputError(f"longest={self.longest}; expected 0 or at least length={self.length}")

    @property
    def corpus(self) -> Corpus:
        """The tokens of the text. InputError if it cannot be read, or is too short."""
        text = corpus.load(self.files or standard_library(), self.tokenizer)
        name = "longest" if self.longest else "length"
        needed, sizes = getattr(self, name), [len(part.tokens) for part in text.parts.values()]
        if min(sizes) < needed:
            raise InputError(
                f"the text has {sum(sizes)} tokens, too few for {name}={needed}; expected about "
                f"{math.ceil(needed / corpus.SHARE)}, of which a tenth is held out and a tenth is for tuning"
            )
        return text

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def window(self) -> int:
        """Number of tokens of the text in a row."""
        return self.length

    @property
    def provenance(self) -> dict[str, Any]:
        return {"rows": "packed", "order": ORDER, "sha256": self.corpus.sha256}

    @property
    def notes(self) -> list[str]:
        """What is left out of the text."""
        return left_out(self.corpus.bad)

    def resized(self, length: int) -> "Text":
        return replace(self, length=length)

    def training(self, seed: int, count: int) -> Rows:
        rows = self.corpus.rows("training", self.window)

        def block(number: int) -> Batch:
            epoch, begin = divmod(number * BLOCK, len(rows))
            epochs = range(epoch, epoch + -(-(begin + BLOCK) // len(rows)))
            numbers = np.concatenate([order(rows, seed, epoch) for epoch in epochs])[begin : begin + BLOCK]
            return self.made(rows, torch.from_numpy(numbers), generator("training", seed, number))

        return Rows(block, count)

    def held_out(self, rows: int, part: Part = "held-out") -> Batch:
        """Rows of a part, evenly spaced if it has more."""
        chosen = evenly_spaced(self.corpus.fresh(part, self.window), rows)
        return self.made(chosen, torch.arange(len(chosen)), generator(part))

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Length -> rows of that length, as many tokens at each."""
        lengths = takewhile(lambda length: length <= self.longest, (self.length * 4**i for i in count()))
        return {n: replace(self, length=n, longest=0).held_out(max(rows * self.length // n, 1)) for n in lengths}

    def made(self, rows: Any, numbers: Tensor, generator: torch.Generator) -> Batch:
        """The rows of the task from those of the text with these numbers."""
        ids = read(rows, numbers)
        return {"input_ids": ids, "shift_labels": shifted(ids)}

    def scores(self, answers: Answers) -> dict[str, float]:
        """loss on repeats: over the tokens that `repeats` marks; absent if there are none."""
        loss, repeats = answers.loss, self.repeats(answers.rows)
        bits_per_byte = loss / math.log(2) / self.corpus.bytes_per_token
        # exp of the loss of a diverged model would overflow
        scores = {"loss": loss, "bits per byte": bits_per_byte, "perplexity": math.exp(min(loss, 700.0))}
        return scores | ({"loss on repeats": answers.losses[repeats].mean().item()} if repeats.any() else {})

    def repeats(self, rows: Batch) -> Tensor:
        """Mask [rows, T] of the labels that complete a bigram that the row has had before and that is rare, at most
        COMMON of the training text's: what an associative memory of the row predicts (Arora et al., arXiv 2312.04927,
        section 3)."""
        labelled = rows["shift_labels"] != IGNORED
        bigrams = rows["input_ids"] * self.vocab_size + rows["shift_labels"].where(labelled, 0)
        repeated = torch.ones_like(labelled)
        for row, seen in zip(bigrams.numpy(), repeated, strict=True):
            seen[np.unique(row, return_index=True)[1]] = False
        return repeated & labelled & ~torch.isin(bigrams, common_bigrams(self.corpus))


def read(rows: Any, numbers: Tensor) -> Tensor:
    """The tokens [len(numbers), window] of rows of a text."""
    return Collator(0)([rows[i] for i in numbers.tolist()])["input_ids"]


@lru_cache(maxsize=2)
def common_bigrams(corpus: Corpus) -> Tensor:
    """The bigrams ab that are more than COMMON of the training text, as a · vocab_size + b."""
    train = torch.from_numpy(corpus.parts["training"].tokens.astype(np.int64))
    bigrams, times = (train[:-1] * corpus.vocab_size + train[1:]).unique(return_counts=True)
    return bigrams[times > COMMON * len(train)]


@lru_cache
def standard_library() -> tuple[str, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata contains paths of the build, so that the text would differ between builds of one version.
    files = sorted(str(path) for path in folder.glob("*.py") if not path.name.startswith("_sysconfig"))
    require(bool(files), f"Python's standard library has no source files in {str(folder)!r}; name text files instead")
    return tuple(files)
