"""Log-probabilities of tokens in the format of OpenAI's completions."""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from ..files.text import Text, text_of
from .sampling import Score


class Logprobs:
    """Formats the scores of one choice, piece by piece. prompt: tokens before them, whose text is not of the choice."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        self.tokenizer, self.prompt, self.offset = tokenizer, prompt, 0

    @cached_property
    def text(self) -> Text:
        return Text(self.tokenizer, (), self.prompt)

    def __call__(self, scores: Iterable[Score]) -> dict[str, list[Any]]:
        """tokens: the text of each. text_offset: the number of characters before each in the text of the choice.
        top_logprobs: of the likeliest tokens and the token itself; of tokens with the same text, the likelier. Null
        stands for a number that is not finite, and for those of the first token of a prompt, which has none."""
        scores = [*scores]
        tokens = {score.token for score in scores} | {t for score in scores for t, _ in score.likeliest}
        texts = token_texts(self.tokenizer, tokens)
        return {
            "tokens": [texts[score.token] for score in scores],
            "token_logprobs": [_finite(score.logprob) for score in scores],
            "top_logprobs": [_top(score, texts) for score in scores],
            "text_offset": [self._offset(score.token) for score in scores],
        }

    def _offset(self, token: int) -> int:
        offset = self.offset
        self.offset += len(self.text.add(token))
        return offset


def token_texts(tokenizer: Any, tokens: set[int]) -> dict[int, str]:
    """The text of each token within a text: of the second of two, as a space before the first may be dropped."""
    once, twice = ([text_of(tokenizer, [token] * n, special=True) for token in tokens] for n in (1, 2))
    return {token: pair[len(single) :] for token, single, pair in zip(tokens, once, twice, strict=True)}


def _top(score: Score, texts: dict[int, str]) -> dict[str, float | None] | None:
    if score.logprob is None:
        return None
    top = {texts[score.token]: _finite(score.logprob)}
    return top | {texts[token]: _finite(value) for token, value in reversed(score.likeliest)}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
