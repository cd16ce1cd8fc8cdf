"""Generates text for all open requests together.

The states of a recurrent model have one size, whatever the number of tokens, so requests join and leave the batch of
those that are generated at any token. Short prompts are processed together, as one packed row. A long prompt is
processed in pieces, and stops before each layer for a turn of the others: short prompts, and a token of the batch. So
the others wait for one layer of one piece.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hf.cache import HeadraceCache
from .sampling import Draw, Sampling, Score, check_generation, scored
from .text import Text

PIECE = 128  # tokens of prompts that are processed in one call


class Piece(NamedTuple):
    """A piece of generated text and the number of tokens so far; `finish` of the last piece is "stop" or "length".
    scores: of the tokens since the last piece, and in the first also of the prompt, as the request asks."""

    text: str
    tokens: int
    finish: str | None = None
    scores: tuple[Score, ...] = ()


Deliver = Callable[[Piece | Exception], None]


class Stream:
    """A request: its prompt, its random generator, and its text so far.

    deliver: called with each piece, or with the error that ended the request."""

    def __init__(self, ids: list[int], sampling: Sampling, tokenizer: Any, device: torch.device, deliver: Deliver):
        self.prompt = deque(torch.tensor([ids], device=device).split(PIECE, 1))
        self.sampling, self.text, self.deliver = sampling, Text(tokenizer, sampling.stop, ids), deliver
        self.count = 0  # tokens
        self.unread = ids[1:] if self.scores_prompt else []  # tokens of the prompt without a score
        self.scores = [Score(ids[0])] if self.scores_prompt else []
        self.draw = Draw(sampling, device) if sampling.temperature > 0 else None
        self.cache = HeadraceCache()  # before the stream joins a batch
        self.gone = threading.Event()  # set if the client has disconnected

    @property
    def scores_prompt(self) -> bool:
        return self.sampling.echo and self.sampling.logprobs is not None

    @property
    def kept(self) -> int:
        """Number of last places of the next piece of the prompt whose logits are needed."""
        return self.prompt[0].shape[1] if self.scores_prompt else 1

    def score(self, logits: Tensor, tokens: list[int]) -> None:
        """Adds the scores of tokens, if they are asked for. logits: [tokens, vocabulary]."""
        if self.sampling.logprobs is not None:
            self.scores += scored(logits, tokens, self.sampling.logprobs)

    def read(self, logits: Tensor) -> Tensor:
        """Scores the tokens that follow those of a piece of the prompt. Returns the logits after the piece, [1,
        vocabulary]. logits: [kept, vocabulary]."""
        self.score(logits, self.unread[: len(logits)])
        self.unread = self.unread[len(logits) :]
        return logits[-1:]

    def add(self, token: int, ends: list[int]) -> bool:
        """Passes the next token on. Returns whether the stream goes on."""
        if not self.sampling.max_tokens:
            return self._deliver("", "length")
        more = self.text.add(token)
        self.count += 1
        if not (self.text.stopped or token in ends) and self.count < self.sampling.max_tokens:
            return self._deliver(more) if more else True
        more += self.text.rest()  # in which there may be a stop string
        return self._deliver(more, "stop" if self.text.stopped or token in ends else "length")

    def _deliver(self, text: str, finish: str | None = None) -> bool:
        self.deliver(Piece(text, self.count, finish, tuple(self.scores)))
        self.scores = []
        return finish is None


class Batch:
    """Streams that get their tokens together. states: of all streams, one after another."""

    def __init__(self, streams: list[Stream], tokens: list[int], cache: HeadraceCache):
        self.streams, self.cache = streams, cache
        self.tokens = tokens  # the last of each stream

    def join(self, others: "Batch") -> None:
        self.cache.append(others.cache)
        self.streams += others.streams
        self.tokens += others.tokens

    def keep(self, places: list[int]) -> None:
        """Removes all streams but those at these places."""
        if len(places) < len(self.streams):
            self.streams = [self.streams[i] for i in places]
            self.tokens = [self.tokens[i] for i in places]
            if places:
                self.cache.batch_select_indices(torch.tensor(places))
            else:
                self.cache.reset()


class Engine:
    """Generates requests in a thread of its own.

    Streams of a recurrent model share one batch. Keys and values of softmax attention have the lengths of their
    sequences, so in a model with attention each stream is a batch of its own."""

    def __init__(self, model: Any, tokenizer: Any):
        check_generation(model)
        self.model, self.tokenizer = model, tokenizer
        ends = model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        self.together = _together(model)
        self.arrivals: SimpleQueue[Stream] = SimpleQueue()
        self.prompts: deque[Stream] = deque()  # of which one piece is left
        self.long: deque[Stream] = deque()
        self.batches: list[Batch] = []
        self.resumed = inf  # when the piece of a long prompt that is processed has gone on; inf: there is none
        self.turn = 0.0  # seconds of the latest turn of the others
        model.model.backbone.before_layer = self._between_layers
        self.thread = threading.Thread(target=self._run, name="generation", daemon=True)

    async def pieces(self, requests: list[tuple[list[int], Sampling]]) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields (index, piece) of the continuations of several prompts, which get their tokens together. Closing the
        iterator (aclose) ends the generation, even while a prompt is processed."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        ended = threading.Event()

        def deliver(index: int, piece: Piece | Exception) -> None:
            if not ended.is_set():
                loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

        streams = [
            Stream(ids, sampling, self.tokenizer, self.model.device, partial(deliver, index))
            for index, (ids, sampling) in enumerate(requests)
        ]
        for stream in streams:
            self.submit(stream)
        left = len(streams)
        try:
            while left:
                index, piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield index, piece
                left -= piece.finish is not None
        finally:
            ended.set()
            for stream in streams:
                stream.gone.set()

    def submit(self, stream: Stream) -> None:
        self.arrivals.put(stream)
        if not self.thread.is_alive():
            self.thread.start()

    @property
    def running(self) -> int:
        """Number of streams that get tokens."""
        return sum(len(batch.streams) for batch in self.batches)

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                if not (self.prompts or self.long or self.batches):
                    self._enqueue(self.arrivals.get())
                self._take_turn()
                if self.long:
                    self._read_long(self.long.popleft())

    def _take_turn(self) -> None:
        """Processes short prompts and generates a token of each stream."""
        with suppress(Empty):
            while True:
                self._enqueue(self.arrivals.get_nowait())
        self._read(self._short())
        for batch in self.batches:
            self._guarded(self._decode, batch, batch.streams)
        self.batches = [batch for batch in self.batches if batch.streams]

    def _enqueue(self, stream: Stream) -> None:
        (self.long if len(stream.prompt) > 1 else self.prompts).append(stream)

    def _short(self) -> list[Stream]:
        """The next prompts that one call takes: one, or several that begin, of at most PIECE tokens together."""
        streams: list[Stream] = []
        tokens = 0
        while self.prompts and (not streams or self.together):
            stream = self.prompts[0]
            tokens += stream.prompt[0].shape[1]
            if streams and (tokens > PIECE or streams[0].cache.is_initialized or stream.cache.is_initialized):
                break
            streams.append(self.prompts.popleft())
        return streams

    def _read_long(self, stream: Stream) -> None:
        """Processes a piece of a long prompt, with turns of the others between its layers."""
        self.resumed = perf_counter()
        self._read([stream])
        self.resumed = inf

    def _between_layers(self) -> None:
        """A turn of the others, for at most half of the time while a long prompt is processed."""
        now = perf_counter()
        if now - self.resumed >= self.turn and threading.current_thread() is self.thread:
            self.resumed = inf  # the layers of a turn are not interrupted
            self._take_turn()
            self.resumed = perf_counter()
            self.turn = self.resumed - now

    def _read(self, streams: list[Stream]) -> None:
        """Processes a piece of one prompt, or several short prompts."""
        streams = [stream for stream in streams if not stream.gone.is_set()]
        if len(streams) > 1:
            self._guarded(self._read_together, streams, streams)
        elif streams:
            self._guarded(self._read_piece, streams[0], streams)

    def _read_piece(self, stream: Stream) -> None:
        kept, piece = stream.kept, stream.prompt.popleft()
        logits = self.model(piece, past_key_values=stream.cache, use_cache=True, logits_to_keep=kept).logits[0]
        last = stream.read(logits)
        if stream.prompt:
            self._enqueue(stream)
        else:
            self._begin([stream], last, stream.cache)

    def _read_together(self, streams: list[Stream]) -> None:
        """Processes short prompts as one packed row. An error may be that of one, so each is then processed alone."""
        prompts, cache = [stream.prompt[0] for stream in streams], HeadraceCache()
        ends = [0, *accumulate(prompt.shape[1] for prompt in prompts)]
        counts = [stream.kept for stream in streams]
        places = [i for end, count in zip(ends[1:], counts, strict=True) for i in range(end - count, end)]
        bounds, kept = (torch.tensor(x, device=self.model.device) for x in (ends, places))
        packed = {"cu_seqlens": bounds, "past_key_values": cache, "use_cache": True, "logits_to_keep": kept}
        try:
            logits = self.model(torch.cat(prompts, 1), **packed).logits[0]
        except Exception:  # is raised again for the prompt whose it is
            for stream in streams:
                self._read([stream])
        else:
            last = [stream.read(part) for stream, part in zip(streams, logits.split(counts), strict=True)]
            self._begin(streams, torch.cat(last), cache)

    def _begin(self, streams: list[Stream], logits: Tensor, cache: HeadraceCache) -> None:
        """Passes on the first token of each stream. Those that go on join the batch."""
        batch = Batch(streams, self._next(streams, logits), cache)
        self._pass_on(batch)
        if batch.streams and self.batches and self.together:
            self.batches[-1].join(batch)
        elif batch.streams:
            self.batches.append(batch)

    def _decode(self, batch: Batch) -> None:
        """Computes the next token of each stream of a batch."""
        batch.keep([i for i, stream in enumerate(batch.streams) if not stream.gone.is_set()])
        if not batch.streams:
            return
        logits = self.model.engine.step(self.model, torch.tensor(batch.tokens, device=self.model.device), batch.cache)
        batch.tokens = self._next(batch.streams, logits[:, -1])
        self._pass_on(batch)

    def _pass_on(self, batch: Batch) -> None:
        """Passes the last token of each stream on, and removes the streams that have ended."""
        steps = zip(batch.streams, batch.tokens, strict=True)
        batch.keep([i for i, (stream, token) in enumerate(steps) if stream.add(token, self.ends)])

    def _next(self, streams: list[Stream], logits: Tensor) -> list[int]:
        """Returns the next token of each stream. logits: [streams, vocabulary]."""
        tokens = logits.argmax(-1).tolist()
        for i, stream in enumerate(streams):
            if stream.draw is not None:
                tokens[i] = stream.draw(logits[i : i + 1].float())
            if stream.sampling.max_tokens:
                stream.score(logits[i : i + 1], tokens[i : i + 1])
        return tokens

    def _guarded(self, work: Callable[[Any], None], what: Any, streams: list[Stream]) -> None:
        """Does the work. An error ends its streams, and no others."""
        try:
            work(what)
        except Exception as error:  # is raised in `pieces`
            for stream in streams:
                stream.deliver(error)
                stream.gone.set()


def _together(model: Any) -> bool:
    """Whether all states have one size, and a sequence that is too long for learned positions ends itself alone."""
    backbone = model.model.backbone
    return backbone.recurrent and getattr(backbone.positions, "table", None) is None
