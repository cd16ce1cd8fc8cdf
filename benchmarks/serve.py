"""The server under load, over the loopback: many streams, clients that leave, a prompt of 100 MB.

python benchmarks/serve.py                              a model of random weights, bytes as tokens
python benchmarks/serve.py --checkpoint FOLDER --streams 500
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from headrace.data.tokenizer import byte_level
from headrace.hf import HeadraceConfig, HeadraceForCausalLM

PATIENCE = 600  # seconds


def made(folder: Path) -> Path:
    config = HeadraceConfig(mixer="softmax-gla", vocab_size=257, hidden_size=256, num_hidden_layers=4, num_heads=4)
    HeadraceForCausalLM(config).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


async def ask(client: httpx.AsyncClient, tokens: int, leave: bool = False) -> tuple[str, float | None]:
    """The status, and seconds to the first token."""
    request = {"prompt": "Once upon a time", "max_tokens": tokens, "stream": True}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        if answer.status_code != 200:
            return str(answer.status_code), None
        lines = answer.aiter_lines()
        await anext(lines)
        first = time.perf_counter() - began
        if leave:
            return "left", first
        return ("200" if [line async for line in lines if line][-1] == "data: [DONE]" else "cut"), first


async def refused(client: httpx.AsyncClient, size: int) -> tuple[str, None]:
    """The status of a prompt of so many bytes."""
    body = b'{"prompt": "' + b"a" * size + b'"}'
    answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    return str(answer.status_code), None


def memory(process: int) -> list[str]:
    """MiB now, and at most since the last call (Linux)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return [f"{int(status[name].split()[0]) / 1024:.0f}" for name in ("VmRSS", "VmHWM")]


async def load(base: str, process: int, streams: int, tokens: int) -> Table:
    table = Table("load", "statuses", "first token, median s", "worst s", "until idle, s", "MiB", "at most")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=PATIENCE, limits=limits, trust_env=False) as client:
        loads = {
            "one stream": [lambda: ask(client, tokens)],
            f"{streams} streams at once": [lambda: ask(client, tokens)] * streams,
            "a prompt of 100 MB": [lambda: refused(client, 10**8)],
            "20 prompts of 500 kB": [lambda: refused(client, 500_000)] * 20,
            "50 clients that leave": [lambda: ask(client, 4096, leave=True)] * 50,
            "one stream again": [lambda: ask(client, tokens)],
        }
        for name, requests in loads.items():
            answers = await asyncio.gather(*(request() for request in requests))
            ended = time.perf_counter()
            while (await client.get("/health")).json()["requests"]:
                await asyncio.sleep(0.01)
            idle = time.perf_counter() - ended
            statuses = Counter(status for status, _ in answers)
            firsts = [first for _, first in answers if first is not None]
            times = [f"{median(firsts):.3f}", f"{max(firsts):.3f}"] if firsts else ["", ""]
            counted = ", ".join(f"{n} × {status}" for status, n in statuses.items())
            table.add_row(name, counted, *times, f"{idle:.2f}", *memory(process))
    return table


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Random weights without one.")] = None,
    streams: Annotated[int, typer.Option(help="At once.")] = 200,
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 64,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        chosen = checkpoint or made(Path(folder))
        command = [
            sys.executable,
            "-c",
            "from headrace.cli import main; main()",
            "serve",
            str(chosen),
            "--port",
            "0",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            base = server.stdout.readline().split()[-1].removesuffix("/v1")
            Console(width=130).print(asyncio.run(load(base, server.pid, streams, tokens)))
        finally:
            server.terminate()
            print(f"ended by SIGTERM with {server.wait()}")


if __name__ == "__main__":
    typer.run(main)
