"""The HTTP routes: limits on requests, and answers in the format of OpenAI."""

import asyncio
import json
import reprlib
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..convert.checkpoint import check_backend, load_on, read_tokenizer
from ..utils.errors import InputError
from .access import LOCAL, Access, Guarded
from .engine import LOG, Engine
from .metrics import Metrics
from .prefix import PrefixCache, check_room, unsupported_reason
from .refusals import Refused, error_response
from .requests import Chat, Completion
from .sampling import Score
from .stream import Piece
from .text import Logprobs, text_of
from .tokenizing import TokenizerProcess, import_ahead

T = TypeVar("T")
GenerationRequest = Completion | Chat

BODY_SECONDS = 30  # in which a body must arrive
DONE = b"data: [DONE]\n\n"  # the end of a stream


@dataclass(frozen=True)
class Limits:
    """Limits on a request and on the number of requests."""

    prompt: int = 32768  # tokens of a prompt
    tokens: int = 4096  # tokens of an answer
    requests: int = 256  # open at a time; each choice for each prompt of a request counts as one
    prefix_cache: int = 256 * 10**6  # bytes of states that are kept for prompts with the same beginning

    @property
    def connections(self) -> int:
        """Largest number of connections, most of which may be idle."""
        return max(1024, 4 * self.requests)

    @property
    def body(self) -> int:
        """Largest body in bytes, for all prompts together: 16 per token of one prompt, more than a token needs in JSON,
        and 64 KiB for the rest."""
        return 16 * self.prompt + 2**16


class Service:
    """One model and the name under which it is served."""

    def __init__(
        self, name: str, model: Any, encoder: TokenizerProcess, decoders: tuple[Any, Any], limits: Limits,
        threads: int | None,
    ):  # fmt: skip
        """decoders: two tokenizers, one for the answers and one for the engine's thread."""
        self.name, self.limits, self.created = name, limits, int(time.time())
        self.vocab_size = model.config.vocab_size
        self.encoder = encoder
        self.tokenizer, decoder = decoders
        prefixes = PrefixCache(limits.prefix_cache)
        self.engine = Engine(model, decoder, prefixes, threads)
        self.open, self.decoding = 0, asyncio.Lock()
        self.metrics = Metrics(lambda: self.open, lambda: self.engine.running, prefixes)

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "requests": self.open})

    async def measured(self, request: Request) -> Response:
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> JSONResponse:
        self._named(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "headrace"}

    def _named(self, name: str | None) -> None:
        if name not in (None, self.name):
            sentence = f"model={reprlib.repr(name)} is not served; expected {self.name!r}"
            raise Refused(404, sentence, "model", "model_not_found")

    @contextmanager
    def admitted(self, more: int) -> Iterator[None]:
        """Counts requests while they are open; each text of a request counts as one. Refused if there are too many."""
        if self.open + more > self.limits.requests:
            sentence = f"{self.open} of {self.limits.requests} requests are open already; try again later"
            raise Refused(429, sentence, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self.open += more
        try:
            yield
        finally:
            self.open -= more

    async def read(self, kind: type[GenerationRequest], request: Request) -> tuple[GenerationRequest, list[list[int]]]:
        """(the request, the tokens of its prompts)"""
        body = kind.read(await read_body(request, self.limits.body))
        self._named(body.model)
        name, most = body.limit
        if (most or 1) > self.limits.tokens:
            raise Refused(400, f"{name}={reprlib.repr(most)}; expected at most {self.limits.tokens}", name)
        prompts = await self.encoder(body.prompts)
        for ids in prompts:
            self._check(ids)
        if (texts := len(prompts) * body.n) > (most := self.limits.requests):
            sentence = f"n={body.n} of {len(prompts)} prompts are {texts} texts; expected at most {most}"
            raise Refused(400, sentence, "n")
        return body, prompts

    async def decoded(self, work: Callable[[], T]) -> T:
        """The result of work that decodes tokens, done in a thread: one at a time, as a tokenizer is not for several
        threads."""
        async with self.decoding:
            answer = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                await asyncio.wait([answer])
            finally:  # also if the client has gone: the thread goes on
                await asyncio.wait([answer])
            return await answer

    def _check(self, ids: list[int]) -> None:
        if not ids:
            raise Refused(400, "the prompt has no tokens; expected some text", "prompt")
        if len(ids) > self.limits.prompt:
            sentence = f"the prompt has {len(ids)} tokens; expected at most {self.limits.prompt}"
            raise Refused(400, sentence, "prompt", "context_length_exceeded")
        if unknown := next((i for i in ids if not 0 <= i < self.vocab_size), None):
            sentence = f"the prompt has the token {reprlib.repr(unknown)}; the model has {self.vocab_size}"
            raise Refused(400, sentence, "prompt")

    async def generate(
        self, body: GenerationRequest, prompts: list[list[int]]
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields (index of the choice, piece) for all choices, which are generated together."""
        texts = [(ids, body.sampling(self.limits.tokens, choice)) for ids in prompts for choice in range(body.n)]
        clocks = [self.metrics.stream(len(ids)) for ids, _ in texts]
        async with aclosing(self.engine.pieces(texts)) as pieces:
            async for index, piece in pieces:
                clocks[index].tick(piece.tokens)
                yield index, piece


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request, of at most `limit` bytes. The content type must be JSON, which a web page of another
    origin cannot send without a CORS preflight."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "the content-type is not application/json; expected a JSON body")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    sentence = f"the body has more than {limit} bytes; expected fewer, for all prompts together"
                    raise Refused(413, sentence)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_SECONDS} seconds") from None
    return bytes(body)


class Answers:
    """The route of one kind of request, as an ASGI application, so that it is notified when the client disconnects."""

    def __init__(self, service: Service, kind: type[GenerationRequest]):
        self.service, self.kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent: set[str] = set()

        async def noted(message: Message) -> None:
            sent.add(message["type"])
            await send(message)

        try:
            with self.service.admitted(1), suppress(ClientDisconnect):
                await self._answer(Request(scope, receive), noted)
        except asyncio.CancelledError:  # as the client has disconnected, or the server ends
            if asyncio.current_task().cancelling() and not sent:  # type: ignore[union-attr]
                raise Refused(503, "the server ends; ask again later", code="server_ends") from None

    async def _answer(self, request: Request, send: Send) -> None:
        body, prompts = await self.service.read(self.kind, request)
        with self.service.admitted(len(prompts) * body.n - 1):
            kind = b"text/event-stream" if body.stream else b"application/json"
            await until_disconnected(send_all(self._chunks(body, prompts), kind, send, request), request.receive)

    async def _chunks(self, body: GenerationRequest, prompts: list[list[int]]) -> AsyncGenerator[bytes, None]:
        """The answer as one JSON object, or as server-sent events, one for each piece."""
        choices, created = await self._choices(body, prompts), int(time.time())
        head = {"id": uuid.uuid4().hex, "object": body.object[body.stream], "created": created}
        head |= {"model": self.service.name}
        async with aclosing(self.service.generate(body, prompts)) as pieces:
            async for index, piece in pieces:
                choices[index].add(piece)
                if body.stream:
                    yield _event(head | {"choices": [await self._formatted(choices[index])]})
        usage = _usage(prompts, choices)
        if not body.stream:
            formatted = [await self._formatted(choice) for choice in choices]
            yield json.dumps(head | {"choices": formatted, "usage": usage}).encode()
            return
        if body.stream_options.include_usage:
            yield _event(head | {"choices": [], "usage": usage})
        yield DONE

    async def _choices(self, body: GenerationRequest, prompts: list[list[int]]) -> list["Choice"]:
        tokenizer, rows = self.service.tokenizer, [ids for ids in prompts for _ in range(body.n)]
        texts = [""] * len(rows)
        if isinstance(body, Completion) and body.echo:
            texts = await self.service.decoded(lambda: [text_of(tokenizer, ids) for ids in rows])
        choices = enumerate(zip(rows, texts, strict=True))
        return [Choice(index, body, tokenizer, ids, text) for index, (ids, text) in choices]

    async def _formatted(self, choice: "Choice") -> dict[str, Any]:
        """What is new of a choice. Only log-probabilities need the tokenizer, and may have to wait for it."""
        return await self.service.decoded(choice.new) if choice.logprobs else choice.new()


class Choice:
    """What is not sent yet of one text of an answer. prompt: its tokens; text: its text, if the answer repeats it."""

    def __init__(self, index: int, body: GenerationRequest, tokenizer: Any, prompt: list[int], text: str):
        self.index, self.body, self.text, self.begun = index, body, text, False
        self.tokens = self.cached = 0
        self.finish: str | None = None
        self.scores: list[Score] = []
        self.logprobs = None
        if isinstance(body, Completion) and body.logprobs is not None:
            self.logprobs = Logprobs(tokenizer, () if body.echo else prompt)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.scores += piece.scores
        self.tokens, self.cached, self.finish = piece.tokens, piece.cached, piece.finish

    def new(self) -> dict[str, Any]:
        """What came since the last call."""
        text, logprobs = self.body.part(self.text, not self.begun), self.logprobs and self.logprobs(self.scores)
        self.text, self.scores, self.begun = "", [], True
        return {"index": self.index, **text, "logprobs": logprobs, "finish_reason": self.finish}


def _usage(prompts: list[list[int]], choices: list["Choice"]) -> dict[str, Any]:
    """The tokens of the prompts, each once, and of all choices. cached_tokens: those that the first choice of each
    prompt did not read."""
    read, new = sum(map(len, prompts)), sum(choice.tokens for choice in choices)
    cached = sum(choice.cached for choice in choices[:: len(choices) // len(prompts)])
    counts = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


async def send_all(chunks: AsyncGenerator[bytes, None], kind: bytes, send: Send, request: Request) -> None:
    """Sends the chunks. The status is sent with the first chunk, so that an earlier failure can have its own status. A
    later one, of a stream, is its last event."""
    begun, end = False, b""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
                    begun = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except Exception as error:
        if not begun:
            raise
        LOG.error("a stream has failed", exc_info=error)
        end = b"data: " + bytes((await error_response(request, error)).body) + b"\n\n" + DONE
    await send({"type": "http.response.body", "body": end})


async def until_disconnected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Awaits the work, and cancels it if the client disconnects first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    watching.add_done_callback(lambda _: working.cancel())
    try:
        await working
    finally:
        watching.cancel()


async def no_chat(request: Request) -> Response:
    sentence = "the tokenizer of the model has no chat template, so it answers no chats; use /v1/completions"
    raise Refused(404, sentence, "model")


def application(
    checkpoint: Path, limits: Limits = Limits(), device: str | None = None, *, name: str | None = None,
    access: Access = LOCAL, threads: int | None = None, weights: str | None = None,
) -> Starlette:  # fmt: skip
    """The ASGI application for a checkpoint on a device. It begins a process for the tokenizer, so a program that calls
    it must guard its main module by `if __name__ == "__main__"`, as for all of multiprocessing.

    Args:
        name: of the model in requests; None: the path of the checkpoint.
        access: who may ask.
        threads: number of PyTorch's threads on a CPU; None: measured (`files.threads`), and written to uvicorn's log.
        weights: of linear layers on a CPU, "int8" or "bfloat16" (`headrace.quantize`); None: those of the checkpoint.

    Raises:
        InputError: the checkpoint or the device cannot be used.
    """
    check_backend()
    import_ahead()
    model: Any = load_on(checkpoint, device, weights)
    if limits.prefix_cache and (reason := unsupported_reason(model)):
        print(f"without a prefix cache: {reason}", file=sys.stderr)
        limits = replace(limits, prefix_cache=0)
    check_room(model, limits.prefix_cache)
    decoders = tokenizer, _ = read_tokenizer(checkpoint), read_tokenizer(checkpoint)
    service = Service(name or str(checkpoint), model, TokenizerProcess(checkpoint), decoders, limits, threads)
    chats = no_chat if tokenizer.chat_template is None else Answers(service, Chat)
    routes = [
        Route("/health", service.health),
        Route("/metrics", service.measured),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/completions", Answers(service, Completion), methods=["POST"]),
        Route("/v1/chat/completions", chats, methods=["POST"]),
    ]
    handlers: Any = dict.fromkeys((HTTPException, InputError, Exception), error_response)
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(Guarded, access=access)])
    app.router.redirect_slashes = False
    return app
