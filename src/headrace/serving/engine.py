"""Generates text for all open requests together.

The states of a recurrent model have one size, whatever the number of tokens, so requests join and leave the batch of
those that are generated at any token. Short prompts are processed together, as one packed row. A long prompt is
processed in pieces, and stops before each layer for a turn of the others: short prompts, and a token of the batch. So
the others wait for one layer of one piece. Prompts with the same beginning are read together up to their first piece
that differs, and go on from states that the prefix cache has kept.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import accumulate
from math import inf
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..files.threads import ThreadsBySize
from ..hf.cache import HeadraceCache
from ..hf.choice import NO_NUMBERS
from .prefix import PIECE, Prefix, PrefixCache, Saved, Tokens, joined, unsupported_reason
from .sampling import Sampling, check_generation, stop_strings
from .stream import Piece, Stream

LOG = logging.getLogger("uvicorn.error")
NONE = -1  # in the place of the likeliest token, where there is none to choose


class Prompt:
    """The next piece of prompts that are the same up to its end, which is read once for all their streams.

    prefix: the tokens before the piece. states: those after them, of this prompt alone or saved; None: the piece is the
    first. piece: number of tokens that it may have."""

    def __init__(self, stream: Stream, prefix: Prefix, states: HeadraceCache | Saved | None, piece: int):
        self.streams, self.prefix, self.states = [stream], prefix, states
        self.tokens = prefix.cut(stream.ids[prefix.length : prefix.length + piece])
        self.end = prefix.then(self.tokens)
        self.end.reader = self  # until the piece is read
        self.is_last = len(stream.ids) == self.end.length
        self.kept = len(self.tokens) if stream.scores_prompt else 1  # number of last places whose logits are needed

    def pass_on(self, logits: Tensor) -> tuple[list[Stream], list[Stream]]:
        """Returns the streams whose prompts end with the piece, and the others. The first has paid for the piece.
        logits: [kept, vocabulary]."""
        for place, stream in enumerate(self.streams):
            stream.cached += len(self.tokens) if place else 0
            stream.read(logits)
        begin = [stream for stream in self.streams if len(stream.ids) == self.end.length]
        return begin, [stream for stream in self.streams if len(stream.ids) > self.end.length]


def states_before(prompts: list[Prompt]) -> HeadraceCache:
    """The states before a piece of each prompt, which may be written to. Either all pieces are first ones, or none."""
    states = [prompt.states for prompt in prompts if prompt.states is not None]
    if len(states) == 1 and isinstance(states[0], HeadraceCache):
        return states[0]
    lists = [each.whole() if isinstance(each, Saved) else each.states or [] for each in states]
    return joined(lists, max(prompt.prefix.length for prompt in prompts)) if states else HeadraceCache()


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
    sequences, so in a model with attention each prompt is a batch of its own, with all streams that begin with it.

    prefixes: None: nothing is kept, and only streams of one request share what is read. threads: number of PyTorch's
    threads on a CPU; None: measured."""

    def __init__(self, model: Any, tokenizer: Any, prefixes: PrefixCache | None = None, threads: int | None = None):
        check_generation(model)
        self.model, self.tokenizer = model, tokenizer
        self.stops = stop_strings(model)
        ends = model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        backbone, table = model.model.backbone, getattr(model.model.backbone.positions, "table", None)
        self.readable: Any = inf if table is None else table.num_embeddings  # tokens, where positions are learned
        self.together, self.divides = backbone.recurrent and table is None, unsupported_reason(model) is None
        self.prefixes = prefixes or PrefixCache(0)
        self.threads = ThreadsBySize(threads, lambda line: LOG.info("threads: %s", line))
        self.arrivals: SimpleQueue[tuple[Stream, ...]] = SimpleQueue()
        self.prompts: deque[Prompt] = deque()  # with one short piece left
        self.long: deque[Prompt] = deque()
        self.ready: list[tuple[Stream, Saved, Tensor]] = []  # whose whole prompts are kept, with states and logits
        self.batches: list[Batch] = []
        self.resumed = inf  # when the piece of a long prompt that is processed has gone on; inf: there is none
        self.turn = 0.0  # seconds of the latest turn of the others
        backbone.before_layer = self._between_layers
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
            Stream(ids, self._limited(sampling, len(ids)), self.tokenizer, self.model.device, partial(deliver, index))
            for index, (ids, sampling) in enumerate(requests)
        ]
        self.submit(*streams)
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

    def _limited(self, sampling: Sampling, prompt: int) -> Sampling:
        """The settings with those of the model, and with no more tokens than follow `prompt` tokens."""
        most = max(self.readable - prompt, 0) + 1  # as the last token is not read
        penalty = sampling.repetition_penalty or self.model.generation_config.repetition_penalty
        stop = *sampling.stop, *self.stops
        return sampling._replace(stop=stop, repetition_penalty=penalty, max_tokens=min(sampling.max_tokens, most))

    def submit(self, *streams: Stream) -> None:
        """Adds the streams of one request."""
        self.arrivals.put(streams)
        if not self.thread.is_alive():
            self.thread.start()

    @property
    def running(self) -> int:
        """Number of streams that get tokens."""
        return sum(len(batch.streams) for batch in self.batches)

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                if not (self.prompts or self.long or self.ready or self.batches):
                    self._arrive(self.arrivals.get())
                self._take_turn()
                if self.long:
                    self.resumed = perf_counter()  # from here on, `_between_layers` gives turns to the others
                    self._read([self.long.popleft()])
                    self.resumed = inf

    def _take_turn(self) -> None:
        """Processes short prompts and generates a token of each stream."""
        with suppress(Empty):
            while True:
                self._arrive(self.arrivals.get_nowait())
        self._read(self._short())
        self._begin_kept()
        for batch in self.batches:
            self._guarded(self._decode, batch, batch.streams)
        self.batches = [batch for batch in self.batches if batch.streams]

    def _arrive(self, streams: tuple[Stream, ...]) -> None:
        alone: dict[tuple[Tokens, bool], Prefix] = {}
        for stream in streams:
            key = stream.ids, stream.scores_prompt
            self._queue(stream, self.prefixes.root if self._shares(stream) else alone.setdefault(key, Prefix()), None)

    def _shares(self, stream: Stream) -> bool:
        """Whether a stream may go on from kept states. A prompt whose tokens are scored is read from its start."""
        return self.prefixes.capacity > 0 and not stream.scores_prompt

    def _queue(self, stream: Stream, prefix: Prefix, states: HeadraceCache | Saved | None) -> None:
        """Puts a stream behind the longest prefix of its prompt that is kept, or that others are about to read. states:
        those after `prefix`, of this stream alone or saved."""
        known, reader = prefix, None
        for longer in prefix.of(stream.ids):
            kept = longer.saved and (longer.length < len(stream.ids) or longer.logits is not None)
            if longer.length > known.length and (kept or longer.reader):
                known, reader = longer, None if kept else longer.reader
        stream.cached += (reader.prefix if reader else known).length - prefix.length
        if reader:
            reader.streams.append(stream)
            return
        if known is not prefix:
            states = known.saved
            self.prefixes.use(known)
        if known.length == len(stream.ids):
            assert isinstance(states, Saved) and known.logits is not None
            stream.prefix = known
            self.ready.append((stream, states, known.logits))
        else:
            prompt = Prompt(stream, known, states, PIECE if self.divides else len(stream.ids))
            (self.prompts if prompt.is_last and len(prompt.tokens) <= PIECE else self.long).append(prompt)

    def _short(self) -> list[Prompt]:
        """The next prompts for one call: one, or several that have at most PIECE tokens together and are all at their
        beginning or none of them."""
        chosen: list[Prompt] = []
        tokens = 0
        for prompt in self.prompts:
            alike = not chosen or (self.together and (prompt.states is None) == (chosen[0].states is None))
            if alike and tokens + len(prompt.tokens) <= PIECE:
                chosen.append(prompt)
                tokens += len(prompt.tokens)
        self.prompts = deque(prompt for prompt in self.prompts if prompt not in chosen)
        return chosen

    def _between_layers(self) -> None:
        """A turn of the others, for at most half of the time while a long prompt is processed."""
        now = perf_counter()
        if now - self.resumed >= self.turn and threading.current_thread() is self.thread:
            self.resumed = inf  # the layers of a turn are not interrupted
            self._take_turn()
            self.resumed = perf_counter()
            self.turn = self.resumed - now

    def _read(self, prompts: list[Prompt]) -> None:
        """Processes a piece of one prompt, or several short prompts."""
        for prompt in prompts:
            prompt.streams = [stream for stream in prompt.streams if not stream.gone.is_set()]
            if not prompt.streams:
                prompt.end.reader = None
        prompts = [prompt for prompt in prompts if prompt.streams]
        if len(prompts) > 1:
            self._guarded(self._read_together, prompts, [stream for prompt in prompts for stream in prompt.streams])
        elif prompts:
            self._guarded(self._read_piece, prompts[0], prompts[0].streams)

    def _read_piece(self, prompt: Prompt) -> None:
        try:
            cache, tokens = states_before([prompt]), torch.tensor([prompt.tokens], device=self.model.device)
            with self._step("prompts", tokens.shape[1]):
                logits = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=prompt.kept).logits
        finally:
            prompt.end.reader = None
        self._pass_on_read([prompt], logits, cache)

    def _read_together(self, prompts: list[Prompt]) -> None:
        """Processes short prompts as one packed row. After an error, which one may cause, each is processed alone."""
        try:
            logits, cache = self._packed(prompts)
        except Exception:  # is raised again for the prompt that causes it
            for prompt in prompts:
                self._read([prompt])
        else:
            for prompt in prompts:
                prompt.end.reader = None
            self._pass_on_read(prompts, logits, cache)

    def _packed(self, prompts: list[Prompt]) -> tuple[Iterable[Tensor], HeadraceCache]:
        """Returns the logits of each prompt, [kept, vocabulary], and the states of all."""
        ends = [0, *accumulate(len(prompt.tokens) for prompt in prompts)]
        counts = [prompt.kept for prompt in prompts]
        places = [i for end, count in zip(ends[1:], counts, strict=True) for i in range(end - count, end)]
        tokens = [token for prompt in prompts for token in prompt.tokens]
        row, bounds, kept = (torch.tensor(x, device=self.model.device) for x in ([tokens], ends, places))
        cache = states_before(prompts)
        packed = {"cu_seqlens": bounds, "past_key_values": cache, "use_cache": True, "logits_to_keep": kept}
        with self._step("prompts", len(tokens)):
            return self.model(row, **packed).logits[0].split(counts), cache

    def _pass_on_read(self, prompts: list[Prompt], logits: Iterable[Tensor], cache: HeadraceCache) -> None:
        """Keeps the states after a piece of each prompt. Of their streams, those that begin get their first token, and
        the others are queued. logits: of each prompt, [kept, vocabulary]."""
        begun: list[tuple[int, Stream, Tensor]] = []  # the sequence in the cache, and the logits of the first token
        for row, (prompt, part) in enumerate(zip(prompts, logits, strict=True)):
            states = None
            begin, go_on = prompt.pass_on(part)
            if self._shares(prompt.streams[0]):
                states = self.prefixes.keep(prompt.end, cache, row, part[-1:] if begin else None)
                for stream in begin:
                    stream.prefix = prompt.end
            alone = len(prompts) == 1 and not begin  # the first that goes on takes the cache itself
            for place, stream in enumerate(go_on):
                self._queue(stream, prompt.end, cache if alone and not place else states)
            begun += [(row, stream, part[-1:]) for stream in begin]
        if begun:
            rows, streams = [row for row, _, _ in begun], [stream for _, stream, _ in begun]
            if rows != [*range(cache.batch_size)]:
                cache.batch_select_indices(torch.tensor(rows))
            self._guarded(partial(self._begin, streams, torch.cat([last for *_, last in begun])), cache, streams)

    def _begin_kept(self) -> None:
        """Begins the streams whose whole prompts are kept."""
        ready, self.ready = self.ready, []
        groups: dict[int, list[tuple[Stream, Saved, Tensor]]] = {}
        for stream, saved, logits in ready:
            groups.setdefault(0 if self.together else id(saved), []).append((stream, saved, logits))
        for group in groups.values():
            self._guarded(self._begin_group, group, [stream for stream, _, _ in group])

    def _begin_group(self, group: list[tuple[Stream, Saved, Tensor]]) -> None:
        cache = joined([saved.whole() for _, saved, _ in group], max(saved.length for _, saved, _ in group))
        self._begin([stream for stream, _, _ in group], torch.cat([logits for *_, logits in group]), cache)

    def _begin(self, streams: list[Stream], logits: Tensor, cache: HeadraceCache) -> None:
        """Passes on the first token of each stream. Those that go on join the batch."""
        for stream in streams:
            if self._shares(stream):
                self.prefixes.queried += len(stream.ids)
                self.prefixes.hits += stream.cached
        batch = Batch(streams, [], cache)
        self._choose(batch, logits)
        if batch.streams and self.batches and self.together:
            self.batches[-1].join(batch)
        elif batch.streams:
            self.batches.append(batch)

    def _decode(self, batch: Batch) -> None:
        """Computes the next token of each stream of a batch."""
        batch.keep([i for i, stream in enumerate(batch.streams) if not stream.gone.is_set()])
        if not batch.streams:
            return
        tokens = torch.tensor(batch.tokens, device=self.model.device)
        with self._step("steps", len(tokens)):
            logits = self.model.engine.step(self.model, tokens, batch.cache)
        self._choose(batch, logits[:, -1])

    def _step(self, kind: str, tokens: int) -> AbstractContextManager[None]:
        return self.threads.step(kind, tokens) if self.model.device.type == "cpu" else nullcontext()

    def _choose(self, batch: Batch, logits: Tensor) -> None:
        """Passes the next token of each stream on, and removes the streams that have ended. An error, such as of
        probabilities that are not numbers, ends its stream alone. logits: [streams, vocabulary]."""
        left: list[int] = []  # rows of the streams that go on
        largest, tokens = logits.max(-1)  # a NaN is the largest
        finite = largest.isfinite()
        for row, stream in enumerate(batch.streams):
            if stream.draw is not None:
                own = logits[row : row + 1].where(finite[row], 0).float()  # no numbers would break CUDA's context
                self._guarded(partial(stream.draw, tokens[row : row + 1]), own, [stream])
        batch.tokens = tokens.where(finite, NONE).tolist()  # waits for a GPU, once for all streams
        for row, stream in enumerate(batch.streams):
            self._guarded(partial(self._choose_one, batch, logits, left), row, [stream])
        batch.keep(left)

    def _choose_one(self, batch: Batch, logits: Tensor, left: list[int], row: int) -> None:
        """The states after a text that ends, which do not cover its last token, are kept."""
        stream, own = batch.streams[row], logits[row : row + 1]
        if stream.gone.is_set():  # as after a draw that has failed
            return
        if stream.sampling.max_tokens:
            if batch.tokens[row] == NONE:
                raise RuntimeError(NO_NUMBERS)
            stream.score(own, batch.tokens[row : row + 1])
        if stream.add(batch.tokens[row], self.ends):
            left.append(row)
        elif stream.prefix is not None and len(stream.tokens) > 1:
            self.prefixes.keep(stream.prefix.then(tuple(stream.tokens[:-1])), batch.cache, row)

    def _guarded(self, work: Callable[[Any], None], what: Any, streams: list[Stream]) -> None:
        """Does the work. An error ends its streams, and no others."""
        try:
            work(what)
        except Exception as error:  # is raised in `pieces`
            for stream in streams:
                stream.deliver(error)
                stream.gone.set()
