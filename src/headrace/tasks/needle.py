"""A needle in a haystack: S-NIAH 1, 2 and 3 of RULER (https://arxiv.org/abs/2404.06654, appendix B), in the very words
of lm-evaluation-harness's niah_single_1, 2 and 3.

    prompt     A special magic number is hidden within the following text. …
               The grass is green. The sky is blue. …
               One of the special magic numbers for lazy-cat is: 4920138.
               The grass is green. The sky is blue. …
               What is the special magic number for lazy-cat mentioned in the provided text? The special …
               … mentioned in the provided text is
    answer      4920138<end>

Kind 1 hides a number in one sentence said again and again, 2 a number in prose, 3 a UUID in prose. A row has as much of
the haystack as it has room for, and the needle anywhere in it. Words are those of the harness, from wonderwords.
"""

import hashlib
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

from ..ops.loss import IGNORED
from ..utils.errors import InputError
from .base import Batch, ByRow, Drawn
from .text import read

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {thing}s for {key} is: {value}."
BEFORE = (
    "A special magic {thing} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {thing} afterwards."
)
QUESTION = "What is the special magic {thing} for {key} mentioned in the provided text?"
ANSWER = "The special magic {thing} for {key} mentioned in the provided text is"
DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]  # of a needle in prose


@dataclass(frozen=True)
class Needle(ByRow, Drawn):
    kind: Literal[1, 2, 3] = 1
    length: int = 1024  # tokens: of the prompt, the answer and the end
    haystack: str | None = None  # a text file, from anywhere in it, around its end if need be; none: random sentences
    tokenizer: str | None = None  # as `headrace prepare` takes it; none: bytes

    name: ClassVar[str] = "needle"
    chance: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.kind not in (1, 2, 3):
            raise InputError(f"needle.kind={self.kind}; expected 1, 2 or 3")
        if self.length < 1:
            raise InputError(f"needle.length={self.length}; expected at least 1, and room for a prompt and its answer")
        if self.kind == 1 and self.haystack is not None:
            raise InputError(f"needle.haystack={self.haystack!r} with kind=1, which is noise; expected kind=2 or 3")

    @property
    def tokens(self) -> Any:
        return load_tokenizer(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def sha256(self) -> str | None:
        return self.haystack and hashlib.sha256(read(Path(self.haystack)).encode()).hexdigest()

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        rng = random.Random(int(torch.randint(2**62, (), generator=generator)))
        ids = torch.full((rows, self.length), self.tokens.eos_token_id)
        labels = torch.full((rows, self.length), IGNORED)
        for i in range(rows):
            prompt, answer = self.row(rng)
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            labels[i, len(prompt) - 1 : end - 1] = torch.tensor(answer)
        return {"input_ids": ids, "shift_labels": labels}

    def row(self, rng: random.Random) -> tuple[list[int], list[int]]:
        """(tokens of a prompt, tokens of its answer and the end), together at most `length`."""
        adjectives, nouns, _ = vocabulary()
        key = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
        uuid4 = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        value = uuid4 if self.kind == 3 else str(rng.randint(10**6, 10**7 - 1))
        depth = rng.random() if self.kind == 1 else rng.choice(DEPTHS)
        each, rest = tokens_taken(replace(self, length=1))
        hay = list(islice(self.pieces(rng), max(math.ceil((self.length - rest) / each), 1)))
        while hay:
            prompt = self.prompt(hay, key, value, depth)
            ids = self.tokens(prompt).input_ids
            answer = self.answer(prompt, ids, value)
            excess = len(ids) + len(answer) - self.length
            if excess <= 0:
                return ids, answer
            del hay[-max(math.ceil(excess / each), 1) :]
        raise InputError(
            f"length={self.length} has no room for a prompt of the task needle and its answer; expected more"
        )

    def prompt(self, hay: list[str], key: str, value: str, depth: float) -> str:
        """What the harness gives a model: hay, pieces of the haystack, with the needle at a depth from 0 to 1."""
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
        """What is to be generated after a prompt of tokens `ids`."""
        whole = self.tokens(f"{prompt} {value}").input_ids
        if whole[: len(ids)] != ids:
            raise InputError(f"tokenizer {self.tokenizer!r} writes a prompt differently once an answer follows it")
        return [*whole[len(ids) :], self.tokens.eos_token_id]

    def pieces(self, rng: random.Random) -> Iterator[str]:
        """The haystack, without an end: sentences of noise, or words."""
        if self.kind == 1:
            return cycle([NOISE])
        if self.haystack is None:
            return random_words(rng)
        words = read_words(self.haystack)
        start = rng.randrange(len(words))
        return cycle(words[start:] + words[:start])


def random_words(rng: random.Random) -> Iterator[str]:
    """The words of random sentences, all of one form."""
    adjectives, nouns, verbs = vocabulary()
    while True:
        yield from ("The", rng.choice(adjectives), rng.choice(nouns), "will", rng.choice(verbs))
        yield from ("the", rng.choice(nouns), "of", "a", rng.choice(nouns) + ".")


@lru_cache(maxsize=1)
def vocabulary() -> tuple[list[str], list[str], list[str]]:
    """(adjectives, nouns, verbs)"""
    try:
        from wonderwords import RandomWord
    except ModuleNotFoundError:
        raise InputError('the task needle needs wonderwords: pip install "headrace[eval]"') from None
    words = RandomWord()
    adjectives, nouns, verbs = (sorted(words.filter(include_categories=[c])) for c in ("adjective", "noun", "verb"))
    return adjectives, nouns, verbs


@lru_cache(maxsize=2)
def load_tokenizer(name: str | None) -> Any:
    try:
        from ..data import tokenizer
    except ModuleNotFoundError as error:
        raise InputError(f'the task needle needs {error.name}: pip install "headrace[eval]"') from None
    return tokenizer.find(name)


@lru_cache(maxsize=2)
def read_words(haystack: str) -> list[str]:
    return read(Path(haystack)).split()


@lru_cache(maxsize=8)
def tokens_taken(task: Needle) -> tuple[float, int]:
    """About so many tokens have (a piece of the haystack, the rest of a row)."""
    some = list(islice(task.pieces(random.Random(0)), 200))
    rest = task.prompt([], "high-pitched-kitty", "1234567", 0.0)
    return len(task.tokens(" ".join(some)).input_ids) / len(some), len(task.tokens(rest).input_ids)
