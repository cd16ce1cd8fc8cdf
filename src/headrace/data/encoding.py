"""Tokens of texts, exactly those of a tokenizer, several times faster.

A text is cut at places where the tokens of the parts are those of the whole, and the tokens of a part are kept: most
words return. A place is safe if the pre-tokenizer always cuts there, whatever stands before and after, and if neither
the normaliser nor an added token reaches across:

    before a space between printable characters ("one| two"), and after a newline between them ("one\\n|two"):
        for all of `PATTERNS`, a piece that contains white space begins with it, or is only white space, or ends a line
    between an ASCII letter and punctuation or the end of its line ("one|, two", "one|\\ntwo"): no piece of `PATTERNS`
        goes on behind a letter with anything but letters

Nothing is cut beside combining marks or unknown white space. A tokenizer without such places is given whole documents.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

KEPT = 1 << 18  # pieces whose tokens are kept, if they have 8 tokens or fewer on average
PRINTED = r"[\w!-~]"  # letters, digits and ASCII punctuation: never white space, never a combining mark
MARKS = r"[!-/:-@\[-`{-~]"
SPACES = rf"(?<={PRINTED})(?= {PRINTED})"
PLACES = re.compile(rf"{SPACES}|(?<={PRINTED}\n)(?={PRINTED})|(?<=[A-Za-z])(?={MARKS}|\n{PRINTED})")
# The first alternative is the second for plain words, and faster.
PIECES = re.compile(rf" ?[A-Za-z]++(?={MARKS}|[ \n]{PRINTED})|[\s\S]+?(?:{PLACES.pattern}|\Z)")
ACROSS = re.compile(rf"{PRINTED} |[A-Za-z](?:{MARKS}|\n)|\n.", re.DOTALL)  # an added token that may hold a place

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = (GPT2, LLAMA, LLAMA.replace("{1,3}", ""))  # of GPT-2 and NeoX, Llama 3, Qwen


def can_be_cut(tokens: PreTrainedTokenizerFast) -> bool:
    """Whether the tokens of the parts of a text that is cut at `PLACES` are those of the whole text."""
    form = json.loads(tokens.backend_tokenizer.to_str())
    model, added = form["model"], [token for token in form["added_tokens"] if not token["special"]]
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and not form.get("truncation")
        and form["normalizer"] in (None, {"type": "NFC"})
        and _pattern(form["pre_tokenizer"]) in PATTERNS
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or ACROSS.search(token["content"])
            for token in added
        )
    )


def _pattern(pre_tokenizer: Any) -> str | None:
    """The regular expression of a pre-tokenizer that isolates its matches and writes them as bytes; None: another."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return pattern
    return None


def last_place(text: str, begin: int) -> int:
    """The last safe place of a text behind the character `begin`, or 0 if there is none."""
    step = 1 << 12
    for first in range(len(text) - step, begin - step, -step):
        first = max(first, begin)
        for found in reversed(list(PLACES.finditer(text, first, first + step + 2))):
            if 0 < found.start() < len(text):
                return found.start()
    return 0


class Encoder:
    """Tokenises texts without special tokens; what looks like one is text.

    Args:
        tokens: the tokenizer, whose words are taken one by one if it `can_be_cut`.
    """

    def __init__(self, tokens: PreTrainedTokenizerFast):
        self.tokenizer = tokens.backend_tokenizer
        self.tokenizer.encode_special_tokens = True
        self.word = np.dtype(np.uint16 if len(tokens) <= 1 << 16 else np.int32)
        self.cut = can_be_cut(tokens)
        self._forget()

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all texts, one after another, and the number of tokens of each text."""
        if not self.cut:
            ids = list(self._whole(texts))
            return np.fromiter(chain.from_iterable(ids), self.word), np.array([len(one) for one in ids], np.int64)
        if max(len(self.known), len(self.flat) // 8) > KEPT:
            self._forget()
        pieces = [PIECES.findall(text) for text in texts]
        found = np.fromiter(map(self.known.__getitem__, chain.from_iterable(pieces)), np.int64)
        self._learn()
        sizes = self.sizes[found]
        ends = np.cumsum(sizes)
        begins = np.repeat(self.begins[found] - (ends - sizes), sizes)
        return self.flat[begins + np.arange(len(begins))], _sums(ends, np.array([len(one) for one in pieces]))

    def _whole(self, texts: list[str]) -> Iterator[list[int]]:
        return (one.ids for one in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    def _forget(self) -> None:
        self.known = _Numbers()
        self.flat, self.sizes, self.begins = np.empty(0, self.word), np.empty(0, np.int64), np.empty(0, np.int64)

    def _learn(self) -> None:
        """Tokenises the pieces that are new."""
        ids = list(self._whole(list(islice(self.known, len(self.sizes), None))))
        if ids:
            self.flat = np.concatenate([self.flat, np.fromiter(chain.from_iterable(ids), self.word)])
            self.sizes = np.concatenate([self.sizes, [len(one) for one in ids]])
            self.begins = np.cumsum(self.sizes) - self.sizes


class _Numbers(dict[str, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, piece: str) -> int:
        self[piece] = number = len(self)
        return number


def _sums(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sums of consecutive groups of `counts` numbers, whose running sums are `ends`."""
    totals = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(counts)])]
    return np.diff(totals)
