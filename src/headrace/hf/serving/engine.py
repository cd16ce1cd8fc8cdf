"""Generates text for all open requests together.

The states of a recurrent model have one size, whatever the number of tokens, so requests join and leave the batch of
those that are generated at any token. A long prompt is processed in pieces, and stops before each layer for a turn of
the others: a prompt of one piece, and a token of the batch. So the others wait for one layer of one piece.
"""

import asyncio
import copy
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from ...utils.errors import InputError
from ..cache import HeadraceCache
from .text import Text

PIECE = 256  # tokens of a prompt that are processed in one call


class Sampling(NamedTuple):
    """Settings of a generation."""

    max_tokens: int
    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


class Piece(NamedTuple):
    """A piece of generated text and the number of tokens so far; `finish` of the last piece is "stop" or "length"."""

    text: str
    tokens: int
    finish: str | None = None


Tell = Callable[[Piece | Exception], None]


class Stream:
    """A request: its prompt, its random generator, and its text so far.

    tell: called with each piece, or with the error that ended the request."""

    def __init__(self, ids: list[int], sampling: Sampling, tokenizer: Any, device: torch.device, tell: Tell):
        self.prompt = deque(torch.tensor([ids], device=device).split(PIECE, 1))
        self.sampling, self.text, self.tell = sampling, Text(tokenizer, sampling.stop), tell
        self.draw = Draw(sampling, device) if sampling.temperature > 0 else None
        self.cache = HeadraceCache()  # before the stream joins a batch
        self.gone = threading.Event()  # set if the client has disconnected

    def add(self, token: int, ends: list[int]) -> bool:
        """Passes the next token on. Returns whether the stream goes on."""
        more, count = self.text.add(token), len(self.text.tokens)
        stopped = self.text.stopped or token in ends
        if not stopped and count < self.sampling.max_tokens:
            if more:
                self.tell(Piece(more, count))
            return True
        self.tell(Piece(more + self.text.rest(), count, "stop" if stopped else "length"))
        return False


class Batch:
    """Streams that get their tokens together. states: of all streams, one after another."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.tokens: list[int] = []  # the last token of each stream
        self.cache = HeadraceCache()

    def join(self, stream: Stream, token: int) -> None:
        self.cache.append(stream.cache)
        self.streams.append(stream)
        self.tokens.append(token)

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
        for layer in model.model.backbone.layers:
            layer.register_forward_pre_hook(self._between_layers)
        self.thread = threading.Thread(target=self._run, name="generation", daemon=True)

    async def pieces(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """Yields the continuation of the tokens. Closing the iterator (aclose) ends the generation, even while the
        prompt is processed."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()

        def tell(piece: Piece | Exception) -> None:
            if not stream.gone.is_set():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        stream = Stream(ids, sampling, self.tokenizer, self.model.device, tell)
        self.submit(stream)
        try:
            finish = None
            while finish is None:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                finish = piece.finish
        finally:
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
        """Processes one short prompt and generates a token of each stream."""
        with suppress(Empty):
            while True:
                self._enqueue(self.arrivals.get_nowait())
        if self.prompts:
            self._read(self.prompts.popleft())
        for batch in self.batches:
            self._guarded(self._decode, batch, batch.streams)
        self.batches = [batch for batch in self.batches if batch.streams]

    def _enqueue(self, stream: Stream) -> None:
        (self.long if len(stream.prompt) > 1 else self.prompts).append(stream)

    def _read_long(self, stream: Stream) -> None:
        """Processes a piece of a long prompt, with turns of the others between its layers."""
        self.resumed = perf_counter()
        self._read(stream)
        self.resumed = inf

    def _between_layers(self, *_: Any) -> None:
        """A turn of the others, for at most half of the time while a long prompt is processed."""
        now = perf_counter()
        if now - self.resumed >= self.turn and threading.current_thread() is self.thread:
            self.resumed = inf  # the layers of a turn are not interrupted
            self._take_turn()
            self.resumed = perf_counter()
            self.turn = self.resumed - now

    def _read(self, stream: Stream) -> None:
        """Processes a piece of a prompt."""
        if not stream.gone.is_set():
            self._guarded(self._read_piece, stream, [stream])

    def _read_piece(self, stream: Stream) -> None:
        piece = stream.prompt.popleft()
        logits = self.model(piece, past_key_values=stream.cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if stream.prompt:
            self._enqueue(stream)
            return
        token = self._next([stream], logits)[0]
        if stream.add(token, self.ends):
            if not self.batches or not self.together:
                self.batches.append(Batch())
            self.batches[-1].join(stream, token)

    def _decode(self, batch: Batch) -> None:
        """Computes the next token of each stream of a batch."""
        batch.keep([i for i, stream in enumerate(batch.streams) if not stream.gone.is_set()])
        if not batch.streams:
            return
        model, device = self.model.model, self.model.device
        x = model.embed_tokens(torch.tensor(batch.tokens, device=device)[:, None])
        x, states = model.backbone(x, batch.cache.states, in_place=True)
        batch.cache.replace(states, 1)
        batch.tokens = self._next(batch.streams, self.model.lm_head(x)[:, -1])
        steps = zip(batch.streams, batch.tokens, strict=True)
        batch.keep([i for i, (stream, token) in enumerate(steps) if stream.add(token, self.ends)])

    def _next(self, streams: list[Stream], logits: Tensor) -> list[int]:
        """Returns the next token of each stream. logits: [streams, vocabulary]."""
        tokens = logits.argmax(-1).tolist()
        for i, stream in enumerate(streams):
            if stream.draw is not None:
                tokens[i] = stream.draw(logits[i : i + 1].float())
        return tokens

    def _guarded(self, work: Callable[[Any], None], what: Any, streams: list[Stream]) -> None:
        """Does the work. An error ends its streams, and no others."""
        try:
            work(what)
        except Exception as error:  # is raised in `pieces`
            for stream in streams:
                stream.tell(error)
                stream.gone.set()


def check_generation(model: Any) -> None:
    """Raises InputError for a generation_config that changes logits, which the server does not do."""
    greedy = copy.deepcopy(model.generation_config)
    greedy.update(do_sample=False, num_beams=1)
    if found := model._get_logits_processor(greedy, 1, torch.zeros(1, 1, dtype=torch.long)):
        names = ", ".join(type(processor).__name__ for processor in found)
        raise InputError(f"the model's generation_config asks for {names}, which the server does not apply")


def _together(model: Any) -> bool:
    """Whether all states have one size, and a sequence that is too long for learned positions ends itself alone."""
    backbone = model.model.backbone
    return backbone.recurrent and getattr(backbone.positions, "table", None) is None


class Draw:
    """Samples tokens as transformers does. Each request has a random generator of its own, so that its text does not
    depend on other requests."""

    def __init__(self, sampling: Sampling, device: torch.device):
        top_p = [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        self.warp = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature)), *top_p])
        self.generator = torch.Generator(device)
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def __call__(self, scores: Tensor) -> int:
        """scores: logits [1, vocabulary]."""
        unused: Any = None
        probabilities = self.warp(unused, scores).softmax(-1)
        return int(torch.multinomial(probabilities, 1, generator=self.generator))
