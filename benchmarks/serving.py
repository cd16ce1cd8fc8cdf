"""Tokens per second of `headrace serve` and of vLLM's server, for a model of random weights, over the loopback.

python benchmarks/serving.py --vllm VENV/bin/python          of a venv with headrace and vLLM
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import typer

import headrace
from headrace.data.tokenizer import byte_level
from headrace.hf import HeadraceConfig, HeadraceForCausalLM
from record import append, environment

RESULTS = Path(__file__).parent / "results" / "serving.csv"
SIZES = {"vocab_size": 257, "hidden_size": 256, "num_hidden_layers": 6, "num_heads": 4}
PORTS = {"headrace": 8701, "vllm": 8702}
PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3


@dataclass
class Row:
    server: str
    server_version: str
    mixer: str
    parameters: int
    streams: int
    tokens: int  # of an answer
    rounds: int
    tokens_per_second: float  # of all streams together: the median of the rounds
    slowest: float
    fastest: float


@contextmanager
def served(name: str, command: list[str]):
    """The address of a server that is ready, which ends with the block."""
    address = f"http://127.0.0.1:{PORTS[name]}"
    settings = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server = subprocess.Popen([*command, "--port", str(PORTS[name])], stdout=sys.stderr, env=settings)
    try:
        for _ in range(600):
            with suppress(httpx.HTTPError):
                httpx.get(f"{address}/health", timeout=5, trust_env=False).raise_for_status()
                break
            time.sleep(1)
        else:
            raise SystemExit(f"{name} did not start")
        yield address
    finally:
        server.terminate()
        server.wait()


async def speed(address: str, model: str, streams: int, tokens: int) -> float:
    """Tokens per second of so many requests at once."""
    asked = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(streams)))
        seconds = time.perf_counter() - began
    return sum(answer.raise_for_status().json()["usage"]["completion_tokens"] for answer in answers) / seconds


def main(
    vllm: Annotated[Path, typer.Option(help="Python of a venv with headrace and vLLM.")],
    mixer: str = "softmax-gla",
    tokens: int = 128,
    rounds: int = 7,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = HeadraceForCausalLM(HeadraceConfig(mixer=mixer, **SIZES))
        for part in (model, byte_level()):
            part.save_pretrained(folder)
        ours = [sys.executable, "-c", "from headrace.cli import main; main()", "serve", folder]
        api = [str(vllm), "-m", "vllm.entrypoints.openai.api_server"]
        theirs = [*api, "--model", folder, "--dtype", "float32", "--enforce-eager"]
        with served("headrace", ours) as one, served("vllm", theirs) as two:
            version = httpx.get(f"{two}/version", trust_env=False).json()["version"]
            versions = {"headrace": headrace.__version__, "vllm": version}
            names = {"headrace": (one, folder), "vllm": (two, folder)}
            for streams in (1, 8):
                found: dict[str, list[float]] = {name: [] for name in names}
                for i in range(rounds + 1):  # the first is not counted
                    for name, (address, called) in names.items():
                        value = asyncio.run(speed(address, called, streams, tokens))
                        found[name] += [value] if i else []
                rows = [
                    Row(name, versions[name], mixer, model.num_parameters(), streams, tokens, rounds,
                        *(round(f(values), 1) for f in (median, min, max)))
                    for name, values in found.items()
                ]  # fmt: skip
                append(RESULTS, environment("cpu"), rows)
                for row in rows:
                    print(f"{row.server:9} {streams} streams: {row.tokens_per_second:8.1f} tokens/s "
                          f"({row.slowest} to {row.fastest})")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
