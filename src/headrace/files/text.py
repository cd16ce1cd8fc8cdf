"""Tokens as text, piece by piece."""

from collections.abc import Sequence
from typing import Any

from ..utils.errors import panics_raised

UNFINISHED = "\ufffd"  # the decoded text of an incomplete character
LONGEST = 4  # bytes of a character, and so tokens
CONTEXT = 8  # tokens of a prompt in whose context its continuation is decoded


def text_of(tokenizer: Any, tokens: list[int], special: bool = False) -> str:
    """The text of tokens, with or without special tokens."""
    with panics_raised():
        return tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


class Text:
    """Decodes tokens one by one to text. Incomplete characters and possible beginnings of a stop string are held back.

    Each step decodes the tokens from the last boundary but one between characters, so that spaces and bytes are decoded
    in their context; the first in the context of the last tokens of the prompt."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], prompt: Sequence[int] = ()):
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        context = [*prompt[-CONTEXT:]]
        self.tokens = [] if self._decode(context).endswith(UNFINISHED) else context
        self.before, self.read, self.held = 0, len(self.tokens), ""
        self.unfinished = 0  # tokens since `read` that end with an incomplete character

    def add(self, token: int) -> str:
        """The additional text that is final after one more token."""
        self.tokens.append(token)
        end = len(self.tokens)
        new = self._new(end)
        if not new or new.endswith(UNFINISHED):
            if not self._decode([token, token]):  # skipped, as special tokens are; one alone may be a dropped space
                self.tokens.pop()
                return ""
            if not self._is_invalid(token):
                return ""
            end -= 1
            new = self._new(end)
        self.before, self.read, self.unfinished = self.read, end, len(self.tokens) - end
        return self._until_stop(new, kept=True)

    def rest(self) -> str:
        """The text held back, after the last token."""
        return "" if self.stopped else self._until_stop(self._new(len(self.tokens)), kept=False)

    def _new(self, end: int) -> str:
        decoded = self._decode(self.tokens[self.before : self.read])
        return self._decode(self.tokens[self.before : end])[len(decoded) :]

    def _is_invalid(self, last: int) -> bool:
        """Whether the tokens before the last are too many for one character, and have none in common with the last."""
        text = self._decode([last])
        if not text.endswith(UNFINISHED):
            return False
        self.unfinished += 1
        *before, _ = tokens = self.tokens[self.before :]
        return self.unfinished > LONGEST and self._decode(before) + text == self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        return text_of(self.tokenizer, tokens)

    def _until_stop(self, new: str, kept: bool) -> str:
        self.held += new
        matches = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if matches:
            self.stopped, end = True, min(matches)
        else:
            begun = (n for stop in self.stop for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
            end = len(self.held) - (max(begun, default=0) if kept else 0)
        text, self.held = self.held[:end], self.held[end:]
        return text
