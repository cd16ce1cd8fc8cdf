"""Speed, latency and memory of `headrace serve`, for random weights, over the loopback; of vLLM's server in turn.

python benchmarks/serving.py
python benchmarks/serving.py --vllm VENV/bin/python          of a venv with headrace and vLLM
python benchmarks/serving.py --shared                        prompts with one prefix, with and without the prefix cache
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import numpy
import psutil
import torch
import typer

import headrace
from headrace.data.tokenizer import byte_level
from headrace.hf import HeadraceConfig, HeadraceForCausalLM
from program import show
from record import RESULTS, Row, append, environment

COLUMNS = (
    "server", "server_version", "mixer", "parameters", "streams", "tokens", "rounds", "tokens_per_second", "slowest",
    "fastest", "load", "prompt_tokens", "requests", "first_p50", "first_p99", "next_p50", "next_p99", "memory",
    "hit_rate",
)  # fmt: skip
SIZES = {"hidden_size": 256, "num_hidden_layers": 6, "num_heads": 4, "max_position_embeddings": 2**16}
PORTS = {"headrace": 8701, "vllm": 8702, "headrace --prefix-cache 0": 8703}
ASCII = 94  # the tokens that are characters by themselves, so that each is an event of its own
STREAMS = 1, 8, 64, 200
LONG, MANY = 50_000, 1000  # tokens of the long prompt; requests before memory is looked at again
PREFIX = 512  # tokens of a shared prefix
NUMBERS = count()


class Server(NamedTuple):
    version: str
    model: str
    process: psutil.Process
    client: httpx.AsyncClient

    def memory(self) -> float:
        family = [self.process, *self.process.children(recursive=True)]
        return sum(process.memory_info().rss for process in family) / 2**20

    async def looked_up(self) -> numpy.ndarray:
        """Tokens of prompts that the prefix cache found, and all that were looked up."""
        page = (await self.client.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return numpy.array([float(values[f"headrace_prefix_cache_{x}_tokens_total"]) for x in ("hit", "queried")])


class Answer(NamedTuple):
    """Seconds to the first token, and between tokens."""

    first: float
    gaps: list[float]


class Measured(NamedTuple):
    """Answers, the seconds that they took together, and the server's memory afterwards."""

    answers: list[Answer]
    seconds: float
    memory: float
    hit_rate: float | None = None  # share of the prompts' tokens that the prefix cache had

    @property
    def speed(self) -> float:
        return sum(1 + len(answer.gaps) for answer in self.answers) / self.seconds


Load = Callable[[Server, str, int], Awaitable[Measured]]  # the arguments: prompt, tokens of an answer


@contextmanager
def served(name: str, command: list[str], model: str):
    """A server that is ready, which ends with the block."""
    address = f"http://127.0.0.1:{PORTS[name]}"
    settings = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server = subprocess.Popen(
        [*command, "--port", str(PORTS[name])], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=settings
    )
    try:
        for _ in range(600):
            with suppress(httpx.HTTPError):
                httpx.get(f"{address}/health", timeout=5, trust_env=False).raise_for_status()
                break
            time.sleep(1)
        else:
            raise SystemExit(f"{name} did not start")
        version = headrace.__version__
        if name == "vllm":
            version = httpx.get(f"{address}/version", trust_env=False).json()["version"]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server closes those that wait
        client = httpx.AsyncClient(base_url=address, timeout=3600, limits=limits, trust_env=False)
        yield Server(version, model, psutil.Process(server.pid), client)
    finally:
        server.terminate()
        server.wait()


async def ask(server: Server, prompt: str, tokens: int) -> Answer:
    request = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    times = [time.perf_counter()]
    async with server.client.stream("POST", "/v1/completions", json=request) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.perf_counter())
    first, *gaps = (after - before for before, after in pairwise(times))
    return Answer(first, gaps)


def distinct(prompt: str) -> str:
    """A prompt of as many tokens that begins like no other."""
    number = str(next(NUMBERS))[::-1]
    return number + prompt[len(number) :]


def at_once(streams: int) -> Load:
    async def load(server: Server, prompt: str, tokens: int) -> Measured:
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(server, distinct(prompt), tokens) for _ in range(streams)))
        return Measured(answers, time.perf_counter() - began, server.memory())

    return load


def after(prefix: Callable[[], str]) -> Load:
    """64 streams at once, whose prompts have one prefix."""

    async def load(server: Server, prompt: str, tokens: int) -> Measured:
        before, shared, began = await server.looked_up(), prefix(), time.perf_counter()
        answers = await asyncio.gather(*(ask(server, shared + distinct(prompt), tokens) for _ in range(64)))
        seconds, (hits, queried) = time.perf_counter() - began, await server.looked_up() - before
        return Measured(answers, seconds, server.memory(), hits / queried if queried else None)

    return load


async def one_by_one(server: Server, prompt: str, tokens: int) -> Measured:
    """Twenty requests for one token, each after the one before."""
    answers = [await ask(server, distinct(prompt), 1) for _ in range(20)]
    return Measured(answers, sum(answer.first for answer in answers), server.memory())


async def beside(server: Server, prompt: str, tokens: int) -> Measured:
    """Requests for one token, each after the one before, while a long prompt is read."""
    reading = asyncio.create_task(ask(server, distinct("a" * LONG), 1))
    answers: list[Answer] = []
    await asyncio.sleep(0.5)  # the text of the long prompt is tokenized
    while not reading.done():
        answers.append(await ask(server, distinct(prompt), 1))
    await reading
    if len(answers) < 2:
        raise SystemExit("the long prompt was read before two short ones were answered")
    answers.pop()  # when it ended, the long prompt had ended
    return Measured(answers, sum(answer.first for answer in answers), server.memory())


async def many(server: Server, prompt: str, tokens: int) -> Measured:
    """A thousand requests for eight tokens, 64 at a time."""
    places, began = asyncio.Semaphore(64), time.perf_counter()

    async def one() -> Answer:
        async with places:
            return await ask(server, distinct(prompt), 8)

    answers = await asyncio.gather(*(one() for _ in range(MANY)))
    return Measured(answers, time.perf_counter() - began, server.memory())


LOADS: dict[str, tuple[Load, int]] = {  # and the number of streams
    **{f"{n} stream{'s' * (n > 1)}": (at_once(n), n) for n in STREAMS},
    "a prompt alone": (one_by_one, 1),
    f"beside a prompt of {LONG:,} tokens": (beside, 2),
    f"{MANY:,} requests": (many, 64),
}
SHARED: dict[str, tuple[Load, int]] = {
    f"64 streams, a new prefix of {PREFIX} tokens": (after(lambda: distinct("a" * PREFIX)), 64),
    "64 streams, the same prefix again": (after(lambda: "b" * PREFIX), 64),
}


ANSWERS = {one_by_one: 1, beside: 1, many: 8}  # tokens of an answer, whatever is asked for


def row(about: Row, load: str, tokens: int, rounds: list[Measured]) -> Row:
    """Times in milliseconds, memory in MiB. first: from the request to the first token. next: between two tokens of a
    stream. tokens_per_second: of all streams together, the median of the rounds. None where a load does not measure
    it."""
    answers = [answer for one in rounds for answer in one.answers]
    firsts, gaps = [answer.first for answer in answers], [gap for answer in answers for gap in answer.gaps]
    speeds = [round(float(f([one.speed for one in rounds])), 1) for f in (numpy.median, min, max)]
    times = [[round(1000 * float(numpy.percentile(x, p)), 2) if x else None for p in (50, 99)] for x in (firsts, gaps)]
    run, streams = (LOADS | SHARED)[load]
    row = about | {"load": load, "streams": streams, "tokens": ANSWERS.get(run, tokens), "rounds": len(rounds)}
    row |= dict(zip(("tokens_per_second", "slowest", "fastest"), speeds if gaps else [None] * 3, strict=True))
    row |= dict(zip(("first_p50", "first_p99", "next_p50", "next_p99"), [*times[0], *times[1]], strict=True))
    row |= {"requests": len(answers), "memory": round(rounds[-1].memory, 1)}
    hits = [one.hit_rate for one in rounds if one.hit_rate is not None]
    row |= {"hit_rate": round(float(numpy.median(hits)), 4) if hits else None}
    return {name: row[name] for name in COLUMNS}


async def measure(
    servers: dict[str, Server], loads: dict[str, tuple[Load, int]], prompt: str, tokens: int, rounds: int, about: dict
) -> list[Row]:
    """The servers take turns; their first answers are not counted."""
    rows = []
    for name, (load, _) in loads.items():
        rounds_of: dict[str, list[Measured]] = {server: [] for server in servers}
        for i in range(rounds + 1 if load is not many else 1):
            for which, server in servers.items():
                result = await load(server, prompt, tokens)
                rounds_of[which] += [result] if i or load is many else []
        for which, server in servers.items():
            length = len(prompt) + (PREFIX if name in SHARED else 0)
            own = {"server": which, "server_version": server.version, "prompt_tokens": length}
            rows.append(row(about | own, name, tokens, rounds_of[which]))
    return rows


def main(
    vllm: Annotated[Path | None, typer.Option(help="Python of a venv with headrace and vLLM.")] = None,
    mixer: str = "softmax-gla",
    prompt: Annotated[str, typer.Option(help="ASCII text; a byte is a token.")] = "Once upon a time",
    tokens: int = 128,
    rounds: int = 5,
    shared: Annotated[bool, typer.Option(help="Prompts with one prefix, with and without the prefix cache.")] = False,
) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = HeadraceForCausalLM(HeadraceConfig(mixer=mixer, vocab_size=257, **SIZES))
        with torch.no_grad():
            model.lm_head.weight[ASCII:] = 0  # never the largest
        for part in (model, byte_level()):
            part.save_pretrained(folder)
        start = [sys.executable, "-c", "from headrace.cli import main; main()", "serve", folder]
        commands = {"headrace": [*start, "--max-prompt-tokens", str(LONG)]}
        if shared:
            commands["headrace --prefix-cache 0"] = [*commands["headrace"], "--prefix-cache", "0"]
        if vllm is not None:
            api = [str(vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
            commands["vllm"] = [*api, "--dtype", "float32", "--enforce-eager"]
        servers = {name: stack.enter_context(served(name, command, folder)) for name, command in commands.items()}
        about = {"mixer": mixer, "parameters": model.num_parameters()}
        rows = asyncio.run(measure(servers, SHARED if shared else LOADS, prompt, tokens, rounds, about))
        append(RESULTS / "serving.csv", environment(), rows)
        numbers = ("tokens_per_second", "first_p50", "first_p99", "next_p50", "next_p99", "memory", "hit_rate")
        lines = [[f"{r['server']}: {r['load']}", *(f"{r[n]:,.4g}" if r[n] else "" for n in numbers)] for r in rows]
        header = ["", "tokens/s", "first token, ms: p50", "p99", "next token, ms: p50", "p99", "MiB", "hit rate"]
        show("Servers", header, lines)


if __name__ == "__main__":
    typer.run(main)
