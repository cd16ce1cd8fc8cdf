"""Generates text with one model, one request after another."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, NamedTuple

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

UNFINISHED = "\ufffd"  # the decoded text of an incomplete character


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


class Engine:
    """Generates one request at a time in a thread; other requests wait."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer
        ends = model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        self.thread = ThreadPoolExecutor(1, "generation")
        self.gone = Event()  # set if the client of the current request has disconnected
        for block in model.model.backbone.layers:
            block.register_forward_pre_hook(self._go_on)

    async def pieces(self, ids: list[int], sampling: Sampling) -> AsyncGenerator[Piece, None]:
        """Yields the continuation of the tokens. Closing the iterator (aclose) ends the generation, even while the
        prompt is processed."""
        loop, gone = asyncio.get_running_loop(), Event()
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

        def tell(piece: Piece | None) -> None:
            if not gone.is_set():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        run: Future[None] = self.thread.submit(self._run, ids, sampling, gone, tell)
        run.add_done_callback(lambda _: tell(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            run.result()  # raises what the generation raised
        finally:
            gone.set()
            run.cancel()

    def _run(self, ids: list[int], sampling: Sampling, gone: Event, tell: Callable[[Piece], None]) -> None:
        self.gone = gone
        text = Text(self.tokenizer, sampling.stop)
        device = self.model.device
        prompt = torch.tensor([ids], device=device)
        drawn = [Draw(sampling, device)] if sampling.temperature > 0 else []
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),  # no token of a prompt is padding
                logits_processor=LogitsProcessorList(drawn),
                stopping_criteria=[Follow(text, tell)],
                max_new_tokens=sampling.max_tokens,
                do_sample=False,  # Draw has sampled already
                num_beams=1,
                use_cache=True,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        rest = text.rest()
        stopped = text.stopped or int(out[0, -1]) in self.ends
        tell(Piece(rest, len(text.tokens), "stop" if stopped else "length"))

    def _go_on(self, *_: Any) -> None:
        if self.gone.is_set():
            raise InterruptedError("the client has gone")


class Draw(LogitsProcessor):
    """Samples a token as transformers does and masks all others. Each request has its own random generator, as the
    global one is shared by all threads."""

    def __init__(self, sampling: Sampling, device: torch.device):
        top_p = [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        self.warp = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature)), *top_p])
        self.generator = torch.Generator(device)
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        token = torch.multinomial(self.warp(input_ids, scores).softmax(-1), 1, generator=self.generator)
        return torch.full_like(scores, -math.inf).scatter(1, token, 0.0)


class Follow(StoppingCriteria):
    """Passes the text of every token to `tell`, and stops the generation at a stop string."""

    def __init__(self, text: "Text", tell: Callable[[Piece], None]):
        self.text, self.tell = text, tell

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if more := self.text.add(int(input_ids[0, -1])):
            self.tell(Piece(more, len(self.text.tokens)))
        return torch.tensor([self.text.stopped], device=input_ids.device)


class Text:
    """Decodes tokens one by one to text. Incomplete characters and possible beginnings of a stop string are held back.

    Each step decodes the tokens from the last boundary but one between characters, so that spaces and bytes are decoded
    in their context."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]):
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        self.tokens: list[int] = []
        self.before, self.read, self.held = 0, 0, ""

    def add(self, token: int) -> str:
        """The additional text that is final after one more token."""
        self.tokens.append(token)
        new = self._new()
        if not new or new.endswith(UNFINISHED):
            return ""
        self.before, self.read = self.read, len(self.tokens)
        return self._until_stop(new, kept=True)

    def rest(self) -> str:
        """The text held back, after the last token."""
        return "" if self.stopped else self._until_stop(self._new(), kept=False)

    def _new(self) -> str:
        known = self._decode(self.tokens[self.before : self.read])
        return self._decode(self.tokens[self.before :])[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _until_stop(self, new: str, kept: bool) -> str:
        self.held += new
        found = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if found:
            self.stopped, end = True, min(found)
        else:
            begun = (n for stop in self.stop for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
            end = len(self.held) - (max(begun, default=0) if kept else 0)
        text, self.held = self.held[:end], self.held[end:]
        return text
