"""Text in memory, for comparisons: read, tokenized and held out as `headrace prepare` does it, in three parts in place
of two."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from ..files.checks import stamps
from ..utils.errors import InputError
from ..utils.integrity import digest
from . import parts, sources, tokenizer
from .encoding import Encoder
from .held_out import Row, choose
from .parts import Tokens
from .rows import Selected, TextRows

SHARE = 0.1  # of the text for each of the parts that are not trained on
BASE = 0x9E3779B97F4A7C15  # of the hash of a window; odd, so that it has an inverse modulo 2^64
PIECE = 2**22  # tokens whose windows are hashed at once


@dataclass(frozen=True, eq=False)
class Corpus:
    """The parts of a text by name: training, tuning and held-out.

    bad: the rows of the sources that are no documents, as in a manifest. sha256: of the sources and the tokenizer."""

    parts: dict[str, Tokens]
    tokenizer: PreTrainedTokenizerFast
    bad: dict[str, dict[str, Any]]
    sha256: str

    @cached_property
    def vocab_size(self) -> int:
        return tokenizer.size(self.tokenizer)

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out part."""
        part = self.parts["held-out"]
        return part.size / max(len(part.tokens), 1)

    def rows(self, part: str, length: int) -> Selected:
        """The full rows of a part."""
        tokens, ends, _ = self.parts[part]
        return TextRows(tokens, ends, length).select(range(len(tokens) // length))

    def fresh(self, part: str, length: int) -> Selected:
        """The full rows of a part that occur in no other part. InputError if there are none."""
        if not len(numbers := fresh(self, part, length)):
            raise InputError(
                f"every row of {length} of the {len(self.parts[part].tokens)} tokens for {part} occurs in another part "
                "of the text too; expected text that does not repeat itself"
            )
        return self.rows(part, length).select(numbers)


def load(files: tuple[str, ...], name: str | None) -> Corpus:
    """The text of files, or of a folder of them, with a tokenizer's tokens (None: bytes).

    InputError if one of them cannot be read, or the text is too short to hold some out."""
    return _load(files, name, stamps(*files, name))


@lru_cache(maxsize=2)
def _load(files: tuple[str, ...], name: str | None, _: Any) -> Corpus:
    if missing := next((file for file in files if not Path(file).exists()), None):
        raise InputError(f"text file {missing!r} does not exist; expected text, jsonl or Parquet files, or a folder")
    tokens, rows = tokenizer.load(name), list(sources.rows(files, "text", cut=False))
    encode = Encoder(tokens)
    rest, held_out = _divided(rows, SHARE, seed=0)
    training, tuning = _divided(rest, SHARE / (1 - SHARE), seed=1)
    split = {"training": training, "tuning": tuning, "held-out": held_out}
    made = {part: parts.tokenized(parts.texts_of(own), encode, tokens.eos_token_id) for part, own in split.items()}
    read = digest([[*map(sources.fingerprint, files)], tokenizer.sha256(tokens)])
    return Corpus(made, tokens, parts.bad_rows(rows), read)


def _divided(rows: list[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(the rest, what is held out) of documents, each of which is one row or several."""
    choice = choose(lambda: rows, share, seed)
    split = [*choice.split(rows)]
    return [*_left(split)], [row for row, held_out in split if held_out]


def _left(split: list[tuple[Row, bool]]) -> Iterator[Row]:
    """What is left of each document, as one document."""
    passed = 0
    for row, held_out in split:
        passed = passed if row.offset else 0
        if not held_out:
            yield row._replace(offset=passed)
            passed += row.size


@lru_cache(maxsize=16)
def fresh(corpus: Corpus, part: str, length: int) -> list[int]:
    """The numbers of the full rows of a part that occur in no other part, at any place. Windows are compared by their
    hashes: a row may be left out by chance, but none that occurs elsewhere is kept."""
    of = {name: tokens for name, (tokens, _, _) in corpus.parts.items()}
    hashes, own = np.unique(window_hashes(of.pop(part), length)[::length], return_inverse=True)
    seen = np.zeros(len(hashes), bool)
    for tokens in of.values():
        for piece in (tokens[low : low + PIECE + length - 1] for low in range(0, len(tokens) - length + 1, PIECE)):
            theirs = window_hashes(piece, length)
            places = np.searchsorted(hashes, theirs).clip(max=len(hashes) - 1)
            seen[places[hashes[places] == theirs]] = True
    return np.flatnonzero(~seen[own]).tolist()


def window_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """The hash Σ_j (1 + token_{s+j}) BASE^j modulo 2^64 of each window of `length` tokens, by its start s."""
    powers, inverses = (np.full(len(tokens), base, np.uint64) for base in (BASE, pow(BASE, -1, 2**64)))
    powers[:1] = inverses[:1] = 1
    sums = np.cumsum((1 + tokens.astype(np.uint64)) * np.cumprod(powers))
    sums = np.concatenate([np.zeros(1, np.uint64), sums])
    return (sums[length:] - sums[: len(sums) - length]) * np.cumprod(inverses)[: len(sums) - length]
