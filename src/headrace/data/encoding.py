"""Tokens of texts, exactly those of a tokenizer, several times faster.

A text is cut at places where the tokens of the parts are those of the whole, and the tokens of a part are kept: most
words return. These places are

    before a space between printable characters ("one| two")
    after a newline between printable characters ("one\n|two")
    between an ASCII letter and punctuation, or a newline before a printable character ("one|, two", "one|\ntwo")

They are safe for byte-level BPE with one of `PATTERNS`, which take a space only as the first of a piece with other
characters, end a piece behind a newline, and go on behind a letter with letters only; and for BPE of the whole text if
no merge makes a token with such a place inside. Neither the normalizer nor an added token may reach across a place;
nothing is cut beside combining marks or unknown white space. A tokenizer of which this is not known is given whole
documents.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from .tokenizer import size

KEPT = 1 << 18  # pieces whose tokens are kept, if they have 8 tokens or fewer on average
PRINTED = r"[\w!-~]"  # letters, digits and ASCII punctuation: never white space, never a combining mark
MARKS = r"[!-/:-@\[-`{-~]"
SPACES = rf"(?<={PRINTED})(?= {PRINTED})"

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = (GPT2, LLAMA, LLAMA.replace("{1,3}", ""))  # of GPT-2 and NeoX, Llama 3, Qwen

PLACES = re.compile(rf"{SPACES}|(?<={PRINTED}\n)(?={PRINTED})|(?<=[A-Za-z])(?={MARKS}|\n{PRINTED})")
# The first alternative is the second for plain words, and faster.
PIECES = re.compile(rf" ?[A-Za-z]++(?={MARKS}|[ \n]{PRINTED})|[\s\S]+?(?:{PLACES.pattern}|\Z)")
ACROSS = re.compile(rf"{PRINTED} |[A-Za-z](?:{MARKS}|\n)|\n.", re.DOTALL)  # an added token that may hold a place
MERGED = re.compile(rf"[^▁]▁|[A-Za-z]{MARKS}|.\n|\n.", re.DOTALL)  # a merged token that may hold a place


def can_be_cut(tokens: PreTrainedTokenizerFast) -> bool:
    """Whether it is known that the tokens of the parts of a text that is cut at `PLACES` are those of the whole."""
    form = json.loads(tokens.backend_tokenizer.to_str())
    model, added = form["model"], [token for token in form["added_tokens"] if not token["special"]]
    if model["type"] != "BPE" or model.get("dropout"):
        return False
    if form["normalizer"] in (None, {"type": "NFC"}) and _pattern(form["pre_tokenizer"]) in PATTERNS:
        return not any(map(_reaches, added))
    return not added and _has_spaces_in_front(form)


def last_place(text: str, begin: int) -> int:
    """The last safe place of a text behind the character `begin`, or 0 if there is none."""
    step = 1 << 12
    for at in range(len(text) - step, begin - step, -step):
        first = max(at, begin)
        places = [match.start() for match in PLACES.finditer(text, first, at + step + 2)]
        if inside := [place for place in places if 0 < place < len(text)]:
            return inside[-1]
    return 0


def _reaches(added: dict[str, Any]) -> bool:
    """Whether an added token may reach across a place."""
    return added["lstrip"] or added["rstrip"] or added["single_word"] or bool(ACROSS.search(added["content"]))


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


def _has_spaces_in_front(form: dict[str, Any]) -> bool:
    """Whether a tokenizer is as Llama 2's and Mistral's: BPE of the whole text, with ▁ for spaces, in which no merge
    reaches across a place, and no character is unknown."""
    space, model = form["pre_tokenizer"] or {}, form["model"]
    return (
        form["normalizer"] is None
        and (space.get("type"), space.get("replacement"), space.get("split")) == ("Metaspace", "▁", False)
        and model["byte_fallback"]
        and not model.get("ignore_merges")
        and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        and not any(MERGED.search("".join(pair)) for pair in model["merges"])
    )


class Encoder:
    """Tokenizes texts without special tokens; what looks like one is text.

    Args:
        tokens: the tokenizer, whose pieces are tokenized one by one if it `can_be_cut`.
    """

    def __init__(self, tokens: PreTrainedTokenizerFast):
        self.cut, self.tokenizer, self.prefix = can_be_cut(tokens), tokens.backend_tokenizer, False
        form = json.loads(self.tokenizer.to_str())
        if self.cut and (form["pre_tokenizer"] or {}).get("type") == "Metaspace":
            self.prefix = form["pre_tokenizer"]["prepend_scheme"] != "never"
            form["pre_tokenizer"]["prepend_scheme"] = "never"  # `begun` writes the prefix where it belongs
            self.tokenizer = Tokenizer.from_str(json.dumps(form))
        self.tokenizer.encode_special_tokens = True
        self.word = np.dtype(np.uint16 if size(tokens) <= 1 << 16 else np.int32)
        self._forget()

    def begun(self, text: str) -> str:
        """The text of the beginning of a document, with the space that the tokenizer writes before it."""
        return " " + text if self.prefix and text and text[0] not in " ▁" else text

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of all texts, one after another, and the number of tokens of each text. The beginning of a
        document is to be passed through `begun` before."""
        if not self.cut:
            ids = list(self._whole(texts))
            return np.fromiter(chain.from_iterable(ids), self.word), np.array([len(tokens) for tokens in ids], np.int64)
        if max(len(self.known), len(self.flat) // 8) > KEPT:
            self._forget()
        pieces = [PIECES.findall(text) for text in texts]
        numbers = np.fromiter(map(self.known.__getitem__, chain.from_iterable(pieces)), np.int64)
        self._learn()
        sizes = self.sizes[numbers]
        ends = np.cumsum(sizes)
        begins = np.repeat(self.begins[numbers] - (ends - sizes), sizes)
        totals = np.concatenate([[0], ends])[np.cumsum([len(tokens) for tokens in pieces])]
        return self.flat[begins + np.arange(len(begins))], np.diff(totals, prepend=0)

    def _whole(self, texts: list[str]) -> Iterator[list[int]]:
        return (encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    def _forget(self) -> None:
        self.known = _Numbers()
        self.flat, self.sizes, self.begins = np.empty(0, self.word), np.empty(0, np.int64), np.empty(0, np.int64)

    def _learn(self) -> None:
        """Tokenizes the pieces that are new."""
        ids = list(self._whole(list(islice(self.known, len(self.sizes), None))))
        if ids:
            self.flat = np.concatenate([self.flat, np.fromiter(chain.from_iterable(ids), self.word)])
            self.sizes = np.concatenate([self.sizes, [len(tokens) for tokens in ids]])
            self.begins = np.cumsum(self.sizes) - self.sizes


class _Numbers(dict[str, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, piece: str) -> int:
        self[piece] = number = len(self)
        return number
