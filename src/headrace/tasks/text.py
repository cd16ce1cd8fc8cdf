"""Causal language modelling on local text files: each token is predicted from the tokens before it.

    input      T  h  e  _  h  e
    answer     h  e  _  h  e  a

Tokens are bytes, or those of a `tokenizers` JSON file. A tenth of the text is held out, and a tenth is for tuning: the
ends of many files, and of fewer than 20 pieces drawn over all of the text (`files.held_out`), as the end of a book is
no sample of it. Rows of these two parts are windows that occur in no other part of the text. The default text is the
source code of Python's standard library.
"""

import gzip
import hashlib
import math
import sysconfig
import zlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count, takewhile
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..files.held_out import FEW, Row, between_paragraphs, choose
from ..files.text import decode
from ..utils.errors import InputError, reading
from .base import Answers, Batch, Metric, Part

HELD_OUT_SHARE = 0.1
COMMON = 1e-5  # a bigram that is more than this share of the training text's is learnt from there, not from the row
PACKED = (".zst", ".bz2", ".xz", ".zip")  # compressed formats that are not supported
BASE = 0x9E3779B97F4A7C15  # of the hash of a window; odd, so that it has an inverse modulo 2^64
PIECE = 2**22  # tokens whose windows are hashed at once


@dataclass(frozen=True)
class Text:
    """Causal language modelling on text files."""

    files: tuple[str, ...] = ()  # empty: Python's standard library
    tokenizer: str | None = None  # a `tokenizers` JSON file; None: bytes
    length: int = 128
    longest: int = 0  # length up to which the loss is evaluated at 1, 4, 16 … times `length` as well; 0: not

    name: ClassVar[str] = "text"
    metric: ClassVar[Metric] = Metric("loss", "nats/token", digits=3, higher_is_better=False)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"length={self.length}; expected at least 1")
        if self.longest and self.longest < self.length:
            raise InputError(f"longest={self.longest}; expected 0 or at least length={self.length}")

    @property
    def corpus(self) -> "Corpus":
        """The tokens of the text. InputError if a file is missing, empty or not UTF-8, or if the text is too short."""
        corpus = load(self.files, self.tokenizer)
        name = "longest" if self.longest else "length"
        needed = getattr(self, name) + 1
        sizes = [len(tokens) for tokens in corpus.parts.values()]
        if min(sizes) < needed:
            raise InputError(
                f"the text has {sum(sizes)} tokens, too few for {name}={needed - 1}; expected about "
                f"{math.ceil(needed / HELD_OUT_SHARE)}, of which a tenth is held out and a tenth is for tuning"
            )
        return corpus

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def sha256(self) -> str:
        return self.corpus.sha256

    def resized(self, length: int) -> "Text":
        return replace(self, length=length)

    def sample(self, generator: torch.Generator, rows: int) -> Batch:
        tokens = self.corpus.train
        return self._windows(tokens, torch.randint(len(tokens) - self.length, (rows,), generator=generator))

    def held_out(self, rows: int, part: Part = "held-out") -> Batch:
        """Windows of a part of the text that occur in no other part and begin at multiples of `length`; if there are
        more than `rows`, evenly spaced ones."""
        starts = self.fresh(part, self.length + 1, self.length)
        return self._windows(self.corpus.parts[part], starts[evenly_spaced(len(starts), rows)])

    def by_length(self, rows: int) -> dict[int, Batch]:
        """Length -> windows of that length, as many tokens at each."""
        lengths = takewhile(lambda length: length <= self.longest, (self.length * 4**i for i in count()))
        return {n: replace(self, length=n, longest=0).held_out(max(rows * self.length // n, 1)) for n in lengths}

    def fresh(self, part: Part, length: int, every: int = 1) -> Tensor:
        """The starts, multiples of `every`, of the windows of `length` tokens of a part that occur in no other part.
        InputError if there are none."""
        tokens = self.corpus.parts[part]
        if not len(starts := fresh(self.files, self.tokenizer, part, length, every)):
            raise InputError(
                f"every window of {length} of the {len(tokens)} tokens for {part} occurs in another part of the text "
                "too; expected text that does not repeat itself"
            )
        return starts

    def _windows(self, tokens: Tensor, starts: Tensor) -> Batch:
        window = tokens[starts[:, None] + torch.arange(self.length + 1)].long()
        return {"input_ids": window[:, :-1].contiguous(), "shift_labels": window[:, 1:].contiguous()}

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
        bigrams = rows["input_ids"] * self.vocab_size + rows["shift_labels"]
        repeated = torch.ones_like(bigrams, dtype=torch.bool)
        for row, seen in zip(bigrams.numpy(), repeated, strict=True):
            seen[np.unique(row, return_index=True)[1]] = False
        return repeated & ~torch.isin(bigrams, self.corpus.common)


@dataclass(frozen=True)
class Corpus:
    """A text as tokens [n] of each part, one behind the other."""

    parts: dict[Part, Tensor]
    vocab_size: int
    bytes_per_token: float  # of the held-out part
    sha256: str

    @property
    def train(self) -> Tensor:
        return self.parts["training"]

    @cached_property
    def common(self) -> Tensor:
        """The bigrams ab that are more than COMMON of `train`, as a · vocab_size + b."""
        train = self.train.long()
        bigrams, times = (train[:-1] * self.vocab_size + train[1:]).unique(return_counts=True)
        return bigrams[times > COMMON * len(train)]


@lru_cache(maxsize=2)
def load(files: tuple[str, ...], tokenizer: str | None) -> Corpus:
    texts = [read(Path(file)) for file in files or standard_library()]
    text = "".join(texts)
    own = _drawn_parts(text) if len(texts) < FEW else _end_parts(text)
    encode, vocab_size = encoder(tokenizer)
    parts = {part: encode(piece) for part, piece in own.items()}
    bytes_per_token = len(own["held-out"].encode()) / max(len(parts["held-out"]), 1)
    return Corpus(parts, vocab_size, bytes_per_token, hashlib.sha256(text.encode()).hexdigest())


def _end_parts(text: str) -> dict[Part, str]:
    share = math.ceil(HELD_OUT_SHARE * len(text))
    return {"training": text[: -2 * share], "tuning": text[-2 * share : -share], "held-out": text[-share:]}


def _drawn_parts(text: str) -> dict[Part, str]:
    rest, held_out = _drawn(text, HELD_OUT_SHARE)
    training, tuning = _drawn(rest, HELD_OUT_SHARE / (1 - HELD_OUT_SHARE))
    return {"training": training, "tuning": tuning, "held-out": held_out}


def _drawn(text: str, share: float) -> tuple[str, str]:
    """(the rest, pieces of a text), each put together."""
    rows = [Row("", 1, text, len(text.encode()))]
    choice = between_paragraphs(choose(rows, share, seed=0), rows)
    parts = [*choice.split(rows)]
    rest, pieces = ("".join(row.text for row, held_out in parts if held_out is wanted) for wanted in (False, True))
    return rest, pieces


@lru_cache(maxsize=16)
def fresh(files: tuple[str, ...], tokenizer: str | None, part: Part, length: int, every: int) -> Tensor:
    """`Text.fresh`, which may return none. Windows are compared by their hashes, so that a window that occurs nowhere
    else may be left out, but none that occurs elsewhere is kept."""
    parts = load(files, tokenizer).parts
    hashes, own = np.unique(window_hashes(parts[part], length)[::every], return_inverse=True)
    seen = np.zeros(len(hashes), bool)
    for tokens in (tokens for other, tokens in parts.items() if other != part):
        for piece in (tokens[low : low + PIECE + length - 1] for low in range(0, len(tokens) - length + 1, PIECE)):
            theirs = window_hashes(piece, length)
            places = np.searchsorted(hashes, theirs).clip(max=len(hashes) - 1)
            seen[places[hashes[places] == theirs]] = True
    return torch.from_numpy(np.flatnonzero(~seen[own])) * every


def window_hashes(tokens: Tensor, length: int) -> np.ndarray:
    """The hash Σ_j (1 + token_{s+j}) BASE^j modulo 2^64 of each window of `length` tokens, by its start s."""
    powers, inverses = (np.full(len(tokens), base, np.uint64) for base in (BASE, pow(BASE, -1, 2**64)))
    powers[0] = inverses[0] = 1
    sums = np.cumsum((1 + tokens.numpy().astype(np.uint64)) * np.cumprod(powers))
    sums = np.concatenate([np.zeros(1, np.uint64), sums])
    return (sums[length:] - sums[: len(sums) - length]) * np.cumprod(inverses)[: len(sums) - length]


def evenly_spaced(total: int, count: int) -> Tensor:
    """`count` of the integers below `total`, or all if there are fewer."""
    return torch.linspace(0, total - 1, min(count, total)).long()


def read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"text file {str(path)!r} cannot be read: {reason}") from None
    if path.suffix.lower() in PACKED:
        raise InputError(f"text file {str(path)!r} is compressed; expected plain text or .gz")
    if not data.strip():
        raise InputError(f"text file {str(path)!r} is empty; expected text in UTF-8")
    return decode(data, f"text file {str(path)!r}")


def standard_library() -> list[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata contains paths of the build, so that the text would differ between builds of one version.
    files = sorted(str(path) for path in folder.glob("*.py") if not path.name.startswith("_sysconfig"))
    if not files:
        raise InputError(f"Python's standard library has no source files in {str(folder)!r}; name text files instead")
    return files


def encoder(tokenizer: str | None):
    """(text -> tokens [n], size of the vocabulary)."""
    if tokenizer is None:
        return as_bytes, 256
    if not Path(tokenizer).is_file():
        raise InputError(f"tokenizer {tokenizer!r} is not a file; expected a `tokenizers` JSON file")
    from tokenizers import Tokenizer

    with reading(f"tokenizer {tokenizer!r} is not a `tokenizers` JSON file"):
        known = Tokenizer.from_file(tokenizer)
    known.encode_special_tokens = True  # as ordinary text

    def encode(text: str) -> Tensor:
        return torch.tensor(known.encode(text, add_special_tokens=False).ids, dtype=torch.int32)

    return encode, known.get_vocab_size()


def as_bytes(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
