"""A request to the server: its prompt, and the text that is generated for it."""

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .prefix import Prefix
from .sampling import Draw, Sampling, Score, scored
from .text import Text


class Piece(NamedTuple):
    """A piece of generated text and the number of tokens so far; `finish` of the last piece is "stop" or "length".
    scores: of the tokens since the last piece, and in the first also of the prompt, as the request asks. cached: number
    of tokens of the prompt that were not read for this text."""

    text: str
    tokens: int
    finish: str | None = None
    scores: tuple[Score, ...] = ()
    cached: int = 0


Deliver = Callable[[Piece | Exception], None]


class Stream:
    """A request: its prompt, its random generator, and its text so far.

    deliver: called with each piece, or with the error that ended the request."""

    def __init__(self, ids: list[int], sampling: Sampling, tokenizer: Any, device: torch.device, deliver: Deliver):
        self.ids, self.sampling, self.deliver = tuple(ids), sampling, deliver
        self.tokenizer = tokenizer
        self.tokens: list[int] = []  # generated
        self.cached = 0  # tokens of the prompt that were not read for this stream
        self.prefix: Prefix | None = None  # the prompt, once it is read and if it may be shared
        self.unread = ids[1:] if self.scores_prompt else []  # tokens of the prompt without a score
        self.scores = [Score(ids[0])] if self.scores_prompt else []
        likeliest = not sampling.temperature and sampling.repetition_penalty in (None, 1)
        self.draw = None if likeliest or not sampling.max_tokens else Draw(sampling, device, ids)
        self.gone = threading.Event()  # set if the client has disconnected

    @cached_property
    def text(self) -> Text:
        """Made in the engine's thread, to which its tokenizer belongs."""
        return Text(self.tokenizer, self.sampling.stop, self.ids)

    @property
    def scores_prompt(self) -> bool:
        return self.sampling.echo and self.sampling.logprobs is not None

    def score(self, logits: Tensor, tokens: list[int]) -> None:
        """Adds the scores of tokens, if they are asked for. logits: [tokens, vocabulary]."""
        if self.sampling.logprobs is not None:
            self.scores += scored(logits, tokens, self.sampling.logprobs)

    def read(self, logits: Tensor) -> None:
        """Scores the tokens of the prompt that follow the last tokens of a piece. logits: [kept, vocabulary]."""
        self.score(logits, self.unread[: len(logits)])
        self.unread = self.unread[len(logits) :]

    def add(self, token: int, ends: list[int]) -> bool:
        """Passes the next token on. Returns whether the stream goes on."""
        if not self.sampling.max_tokens:
            return self._deliver("", "length")
        more = "" if token in ends else self.text.add(token)  # not all tokenizers skip a token that ends texts
        self.tokens.append(token)
        if not (self.text.stopped or token in ends) and len(self.tokens) < self.sampling.max_tokens:
            return self._deliver(more) if more else True
        more += self.text.rest()  # in which there may be a stop string
        return self._deliver(more, "stop" if self.text.stopped or token in ends else "length")

    def _deliver(self, text: str, finish: str | None = None) -> bool:
        self.deliver(Piece(text, len(self.tokens), finish, tuple(self.scores), self.cached))
        self.scores = []
        return finish is None
