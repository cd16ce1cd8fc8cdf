"""A needle in a haystack: S-NIAH 1, 2 and 3 of RULER (https://arxiv.org/abs/2404.06654, appendix B), with the wording
of niah_single_1, 2 and 3 of lm-evaluation-harness.

    prompt     A special magic number is hidden within the following text. …
               The grass is green. The sky is blue. …
               One of the special magic numbers for lazy-cat is: 4920138.
               The grass is green. The sky is blue. …
               What is the special magic number for lazy-cat mentioned in the provided text? The special …
               … mentioned in the provided text is
    answer      4920138<end>

Kind 1 hides a number in repeated sentences, kind 2 a number in prose, kind 3 a UUID in prose. A row is filled with as
much of the haystack as fits, with the needle at a random depth. Keys are words of wonderwords, as in the harness. A
number that is held out is in no training row.
"""

import math
import random
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..data import sources, tokenizer
from ..files.checks import stamps
from ..ops.loss import IGNORED
from ..utils.errors import InputError, require
from ..utils.extras import require_packages
from ..utils.integrity import digest, sha256
from .base import Batch, ByRow, Drawn

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {thing}s for {key} is: {value}."
BEFORE = (
    "A special magic {thing} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {thing} afterwards."
)
QUESTION = "What is the special magic {thing} for {key} mentioned in the provided text?"
ANSWER = "The special magic {thing} for {key} mentioned in the provided text is"
DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]  # relative positions of a needle in prose


@dataclass(frozen=True)
class Needle(ByRow, Drawn):
    """A needle in a haystack."""

    kind: Literal[1, 2, 3] = 1
    length: int = 1024  # tokens of prompt, answer and end token together
    haystack: str | None = None  # a text file, read cyclically from a random word; None: random sentences
    tokenizer: str | None = None  # as for `headrace prepare`; None: bytes

    name: ClassVar[str] = "needle"
    chance: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        require(self.kind in (1, 2, 3), f"needle.kind={self.kind}; expected 1, 2 or 3")
        expected = "at least 1, and enough for a prompt and its answer"
        require(self.length >= 1, f"needle.length={self.length}; expected {expected}")
        if self.kind == 1 and self.haystack is not None:
            raise InputError(f"needle.haystack={self.haystack!r} is not used by kind=1; expected kind=2 or 3")

    @property
    def tokens(self) -> Any:
        return load_tokenizer(self.tokenizer, stamps(self.tokenizer))

    @property
    def vocab_size(self) -> int:
        return tokenizer.size(self.tokens)

    @property
    def provenance(self) -> dict[str, str]:
        """The SHA-256 of the haystack, and a digest of the tokenizer."""
        tokens = {} if self.tokenizer is None else {"tokenizer_sha256": digest(self.tokens.backend_tokenizer.to_str())}
        return tokens if self.haystack is None else tokens | {"sha256": sha256(Path(self.haystack))}

    def draw(self, generator: torch.Generator, rows: int) -> Batch:
        """The seed of each row, from which its value can be known without making the row."""
        return {"seed": torch.randint(2**62, (rows,), generator=generator)}

    def content(self, drawn: Batch) -> Tensor:
        """The characters of the value."""
        return torch.tensor([list(self.value(random.Random(seed)).encode()) for seed in drawn["seed"].tolist()])

    def complete(self, drawn: Batch) -> Batch:
        rows = len(drawn["seed"])
        ids = torch.full((rows, self.length), self.tokens.eos_token_id)
        labels = torch.full((rows, self.length), IGNORED)
        for i, seed in enumerate(drawn["seed"].tolist()):
            prompt, answer = self.row(random.Random(seed))
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            labels[i, len(prompt) - 1 : end - 1] = torch.tensor(answer)
        return {"input_ids": ids, "shift_labels": labels}

    def value(self, rng: random.Random) -> str:
        """The number or UUID to hide: the first that is drawn for a row."""
        if self.kind == 3:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return str(rng.randint(10**6, 10**7 - 1))

    def row(self, rng: random.Random) -> tuple[list[int], list[int]]:
        """(tokens of a prompt, tokens of its answer with the end token), together at most `length`."""
        adjectives, nouns, _ = vocabulary()
        value, key = self.value(rng), f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
        depth = rng.random() if self.kind == 1 else rng.choice(DEPTHS)
        each, rest = approximate_tokens(replace(self, length=1), stamps(self.haystack, self.tokenizer))
        hay = list(islice(self.pieces(rng), max(math.ceil((self.length - rest) / each), 1)))
        while hay:
            prompt = self.prompt(hay, key, value, depth)
            ids = self.tokens(prompt).input_ids
            answer = self.answer(prompt, ids, value)
            if (excess := len(ids) + len(answer) - self.length) <= 0:
                return ids, answer
            del hay[-max(math.ceil(excess / each), 1) :]
        raise InputError(
            f"length={self.length} is too short for a prompt of the task needle and its answer; expected more"
        )

    def prompt(self, hay: list[str], key: str, value: str, depth: float) -> str:
        """The prompt of the harness with the pieces `hay` of the haystack and the needle at a depth from 0 to 1."""
        named = {"thing": "uuid" if self.kind == 3 else "number", "key": key}
        needle = NEEDLE.format(**named, value=value)
        if self.kind == 1:
            at = int(len(hay) * depth)
            text = "\n".join([*hay[:at], needle, *hay[at:]])
        else:
            sentences = re.split(r"(?<=[.!?])\s+", " ".join(hay))
            at = int(len(sentences) * depth)
            text = " ".join([" ".join(sentences[:at]), needle, " ".join(sentences[at:])])
        return f"{BEFORE.format(**named)}\n{text}\n{QUESTION.format(**named)} {ANSWER.format(**named)}"

    def answer(self, prompt: str, ids: list[int], value: str) -> list[int]:
        """The tokens to generate after a prompt with tokens `ids`: the value and the end token."""
        whole = self.tokens(f"{prompt} {value}").input_ids
        if whole[: len(ids)] != ids:
            raise InputError(f"tokenizer {self.tokenizer!r} tokenizes a prompt differently if an answer follows")
        return [*whole[len(ids) :], self.tokens.eos_token_id]

    def pieces(self, rng: random.Random) -> Iterator[str]:
        """Yields pieces of the haystack without end: noise sentences or words."""
        if self.kind == 1:
            return cycle([NOISE])
        if self.haystack is None:
            return random_words(rng)
        words = read_words(self.haystack, stamps(self.haystack))
        start = rng.randrange(len(words))
        return cycle(words[start:] + words[:start])


def random_words(rng: random.Random) -> Iterator[str]:
    """Yields the words of random sentences of one form."""
    adjectives, nouns, verbs = vocabulary()
    while True:
        yield from ("The", rng.choice(adjectives), rng.choice(nouns), "will", rng.choice(verbs))
        yield from ("the", rng.choice(nouns), "of", "a", rng.choice(nouns) + ".")


@lru_cache(maxsize=1)
def vocabulary() -> tuple[list[str], list[str], list[str]]:
    """(adjectives, nouns, verbs)"""
    require_packages("the task needle", "wonderwords")
    from wonderwords import RandomWord

    words = RandomWord()
    adjectives, nouns, verbs = (sorted(words.filter(include_categories=[c])) for c in ("adjective", "noun", "verb"))
    return adjectives, nouns, verbs


@lru_cache(maxsize=2)
def load_tokenizer(name: str | None, _: Any) -> Any:
    return tokenizer.load(name)


@lru_cache(maxsize=2)
def read_words(haystack: str, _: Any) -> list[str]:
    return sources.text_of(haystack).split()


@lru_cache(maxsize=8)
def approximate_tokens(task: Needle, _: Any) -> tuple[float, int]:
    """Approximate number of tokens of (a piece of the haystack, the rest of a row)."""
    some = list(islice(task.pieces(random.Random(0)), 200))
    rest = task.prompt([], "high-pitched-kitty", "1234567", 0.0)
    return len(task.tokens(" ".join(some)).input_ids) / len(some), len(task.tokens(rest).input_ids)
