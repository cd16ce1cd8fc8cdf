"""The HTTP routes: limits on requests, and answers in the format of OpenAI."""

import asyncio
import json
import reprlib
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...utils.device import on_device
from ...utils.errors import InputError
from ..checkpoint import check_backend, load
from ..generate import read_tokenizer
from .engine import Engine, Piece
from .metrics import Metrics
from .requests import Chat, Completion, Refused

GenerationRequest = Completion | Chat

BODY_SECONDS, SEND_SECONDS = 30, 60  # timeouts for receiving a body, and for sending a piece of an answer


@dataclass(frozen=True)
class Limits:
    """Limits on a request and on the number of requests."""

    prompt: int = 32768  # tokens of a prompt
    tokens: int = 4096  # tokens of an answer
    requests: int = 256  # open at a time

    @property
    def body(self) -> int:
        """Largest body in bytes: 16 per token of a prompt, more than a token needs in JSON, and 64 KiB for the rest."""
        return 16 * self.prompt + 2**16


class Service:
    """One model and the name under which it is served."""

    def __init__(self, name: str, model: Any, tokenizers: tuple[Any, Any], limits: Limits):
        self.name, self.limits, self.created = name, limits, int(time.time())
        self.vocab_size = model.config.vocab_size
        self.tokenizer, decoder = tokenizers  # one for each thread
        self.engine = Engine(model, decoder)
        self.requests, self.tokenising = 0, asyncio.Lock()
        self.metrics = Metrics(lambda: self.requests, lambda: self.engine.running)

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "requests": self.requests})

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
            raise Refused(
                404, f"model={reprlib.repr(name)} is not served; expected {self.name!r}", "model", "model_not_found"
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request while it is open. Refused if too many are."""
        if self.requests >= self.limits.requests:
            sentence = f"{self.limits.requests} requests are open already; try again later"
            raise Refused(429, sentence, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    async def read(self, kind: type[GenerationRequest], request: Request) -> tuple[GenerationRequest, list[list[int]]]:
        """(the request, the tokens of its prompts)"""
        asked = kind.read(await read_body(request, self.limits.body))
        self._named(asked.model)
        if (asked.max_tokens or 1) > self.limits.tokens:
            sentence = f"max_tokens={reprlib.repr(asked.max_tokens)}; expected at most {self.limits.tokens}"
            raise Refused(400, sentence, "max_tokens")
        async with self.tokenising:  # one at a time, as tokenising needs about a hundred times the memory of the text
            prompts = await asyncio.to_thread(asked.prompts, self.tokenizer)
        for ids in prompts:
            self._check(ids)
        return asked, prompts

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
        self, asked: GenerationRequest, prompts: list[list[int]]
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields (index of the choice, piece) for all choices."""
        for row, ids in enumerate(prompts):
            for choice in range(asked.n):
                sampling = asked.sampling(self.limits.tokens, choice)
                clock = self.metrics.stream(len(ids))
                async with aclosing(self.engine.pieces(ids, sampling)) as pieces:
                    async for piece in pieces:
                        clock.tick(piece.tokens)
                        yield row * asked.n + choice, piece


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
                    raise Refused(413, f"the body has more than {limit} bytes; expected a shorter prompt")
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_SECONDS} seconds") from None
    return bytes(body)


class Answers:
    """The route of one kind of request, as an ASGI application, so that it is notified when the client disconnects."""

    def __init__(self, service: Service, kind: type[GenerationRequest]):
        self.service, self.kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Requests are cancelled when their client disconnects and when the server ends.
        with self.service.admitted(), suppress(ClientDisconnect, asyncio.CancelledError):
            asked, prompts = await self.service.read(self.kind, Request(scope, receive))
            answer = self.stream(asked, prompts) if asked.stream else self.whole(asked, prompts)
            kind = b"text/event-stream" if asked.stream else b"application/json"
            await until_disconnected(send_all(answer, kind, send), receive)

    async def whole(self, asked: GenerationRequest, prompts: list[list[int]]) -> AsyncGenerator[bytes, None]:
        """The answer as one JSON object."""
        texts = [""] * (len(prompts) * asked.n)
        ends: list[Piece] = []
        async with aclosing(self.service.generate(asked, prompts)) as pieces:
            async for index, piece in pieces:
                texts[index] += piece.text
                if piece.finish:
                    ends.append(piece)
        choices = [_choice(i, asked.choice(text), end) for i, (text, end) in enumerate(zip(texts, ends, strict=True))]
        usage = _usage(prompts, sum(end.tokens for end in ends))
        yield json.dumps(self._head(asked.object[0]) | {"choices": choices, "usage": usage}).encode()

    async def stream(self, asked: GenerationRequest, prompts: list[list[int]]) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, one for each piece."""
        head, latest, tokens = self._head(asked.object[1]), -1, 0
        async with aclosing(self.service.generate(asked, prompts)) as pieces:
            async for index, piece in pieces:
                choice = _choice(index, asked.delta(piece.text, first=index != latest), piece)
                latest, tokens = index, tokens + (piece.tokens if piece.finish else 0)
                yield _event(head | {"choices": [choice]})
        if asked.stream_options.include_usage:
            yield _event(head | {"choices": [], "usage": _usage(prompts, tokens)})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": self.service.name}


def _choice(index: int, text: dict[str, Any], piece: Piece) -> dict[str, Any]:
    return {"index": index, **text, "logprobs": None, "finish_reason": piece.finish}


def _usage(prompts: list[list[int]], tokens: int) -> dict[str, int]:
    given = sum(map(len, prompts))
    return {"prompt_tokens": given, "completion_tokens": tokens, "total_tokens": given + tokens}


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


async def send_all(chunks: AsyncGenerator[bytes, None], kind: bytes, send: Send) -> None:
    """Sends the chunks. The status is sent with the first chunk, so that an earlier failure can have its own status."""

    async def sent(part: str, **message: Any) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": f"http.response.{part}", **message})
        except TimeoutError:
            raise ClientDisconnect from None

    begun = False
    async with aclosing(chunks):
        async for chunk in chunks:
            if not begun:
                await sent("start", status=200, headers=[(b"content-type", kind)])
                begun = True
            await sent("body", body=chunk, more_body=True)
    await sent("body")


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


async def error_response(request: Request, error: Any) -> JSONResponse:
    """Every error in the format of OpenAI: a refusal, a 404 or 405 of the router, an InputError of the model (such as
    for a text longer than its learned positions), or a failure of the server."""
    status, headers, param, code = getattr(error, "status_code", 500), getattr(error, "headers", None), None, None
    if isinstance(error, Refused):
        sentence, param, code = error.detail, error.param, error.code
    elif isinstance(error, HTTPException):
        sentence = f"{request.method} {request.url.path} is not served"
    elif isinstance(error, InputError):
        status, sentence = 400, str(error)
    else:
        sentence = f"the server failed with {type(error).__name__}; its log says where"
    kind = {404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
    return JSONResponse({"error": {"message": sentence, "type": kind, "param": param, "code": code}}, status, headers)


def application(checkpoint: Path, limits: Limits = Limits(), device: str | None = None) -> Starlette:
    """The ASGI application for a checkpoint on a device. InputError if either cannot be used."""
    check_backend()
    model: Any = load(checkpoint)
    model.to(on_device(device))
    tokenizer, decoder = read_tokenizer(checkpoint), read_tokenizer(checkpoint)
    service = Service(str(checkpoint), model, (tokenizer, decoder), limits)
    routes = [
        Route("/health", service.health),
        Route("/metrics", service.measured),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/completions", Answers(service, Completion), methods=["POST"]),
    ]
    if tokenizer.chat_template is not None:
        routes.append(Route("/v1/chat/completions", Answers(service, Chat), methods=["POST"]))
    handlers: Any = dict.fromkeys((HTTPException, InputError, Exception), error_response)
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.router.redirect_slashes = False
    return made
