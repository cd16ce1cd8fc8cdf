"""Language models as large as the GLA paper's 340M, ours and others', of equal width and depth.

    python benchmarks/model.py train --layers 1 --layers 4     tokens a second: forward, backward and AdamW
    python benchmarks/model.py decode                          tokens a second after 4096, one sequence
    python benchmarks/model.py prefill --layers 4              memory over the weights, 100 000 tokens at once; ours

Vocabulary 32 000, float32, weights at random. Where fewer than 24 layers were trained, docs/results.md says what a
straight line through two depths gives for 24, and that it is one. Models train one at a time, round after round; they
decode in turn, token by token.
"""

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from headrace import quantize
from headrace.layers.quantized import Int8Linear
from headrace.studies.bench.decoding import Decoder
from headrace.studies.bench.models import Shape, llama, mamba2, ours, qwen3_next
from race import spread
from record import append, environment

RESULTS = Path(__file__).parent / "results" / "model.csv"
VOCABULARY, DEPTH = Shape.vocab_size, Shape.layers
TOKENS, CONTEXT, PREFILL = 2048, 4096, 100_000
OURS = ("gla", "softmax-gla", "gated-deltanet", "mamba2")
console = Console(width=None if Console().is_terminal else 120)
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Row:
    what: str  # train, decode or prefill
    name: str
    parameters: int
    layers: int
    tokens: int  # in a training step, in the context that is decoded from, or prefilled
    rounds: int
    seconds: float  # a training step, a decoded token, or the prefill; by the wall clock
    tokens_per_second: float
    spread: float
    ratio: float  # seconds over those of the first of ours
    peak_mb: float  # prefill: the process's peak over what it took with the weights alone


MODELS: dict[str, Callable[[Shape], nn.Module]] = {
    **{f"headrace {name}": lambda shape, name=name: ours(name, shape) for name in OURS},
    "transformers Mamba2": mamba2,
    "transformers Qwen3Next, linear layers alone": qwen3_next,
    "transformers Llama": llama,
}


DECODED = MODELS | {
    "headrace gla, weights in bfloat16": lambda shape: ours("gla", shape).bfloat16(),
    "headrace gla, weights in int8": lambda shape: quantize(ours("gla", shape)),
}


def built(name: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return DECODED[name](Shape(layers))


def parameters(model: nn.Module) -> int:
    buffers = (layer.integers.numel() for layer in model.modules() if isinstance(layer, Int8Linear))
    return sum(p.numel() for p in model.parameters()) + sum(buffers)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: int) -> float:
    ids = torch.randint(VOCABULARY, (1, tokens))
    start = time.perf_counter()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def trained(name: str, layers: int, tokens: int) -> tuple[float, int]:
    """Seconds of a step after a short one that warms up, and the model's parameters."""
    model = built(name, layers).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    training_step(model, optimizer, min(tokens, 64))
    seconds, size = training_step(model, optimizer, tokens), parameters(model)
    del model, optimizer
    gc.collect()
    return seconds, size


def rows(what: str, layers: int, tokens: int, per: int, times: dict[str, list[float]], sizes: dict) -> list[Row]:
    base = next(iter(times.values()))
    return [
        Row(
            what, name, sizes[name], layers, tokens, len(own), round(median(own), 5), round(per / median(own), 2),
            round(spread(own), 3), round(median(x / y for x, y in zip(own, base, strict=True)), 3), 0.0,
        )
        for name, own in times.items()
    ]  # fmt: skip


class Reader(Decoder):
    """A model that has read its context and goes on, token by token."""

    def __init__(self, name: str, layers: int, context: int):
        super().__init__(built(name, layers))
        self.name, self.size = name, parameters(self.model)
        self.read(context)

    def timed(self) -> float:
        start = time.perf_counter()
        self.token()
        return time.perf_counter() - start


def resident() -> float:
    """Bytes that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def prefilled(name: str, layers: int, tokens: int, threads: int) -> Row:
    torch.set_num_threads(threads)
    model = built(name, layers).eval()
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 64, dtype=torch.long), use_cache=True, logits_to_keep=1)
        before, start = resident(), time.perf_counter()
        model(input_ids=torch.randint(VOCABULARY, (1, tokens)), use_cache=True, logits_to_keep=1)
    seconds = time.perf_counter() - start
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Row("prefill", name, parameters(model), layers, tokens, 1, round(seconds, 3), round(tokens / seconds, 1),
               0.0, 1.0, round(peak / 1e6, 1))  # fmt: skip


def report(output: Path, threads: int, found: list[Row]) -> None:
    about = environment("cpu") | {"threads": threads}
    append(output, about, found)
    table = Table(title=f"{found[0].what}, {found[0].layers} layers, {found[0].tokens} tokens", title_justify="left")
    for title in ("", "time / ours", "tokens/s", "parameters", "MB over the weights"):
        table.add_column(title, justify="right" if title else "left")
    for row in found:
        memory = f"{row.peak_mb:.0f}" if row.peak_mb else ""
        speed = f"{row.tokens_per_second:.1f} ±{row.spread:.0%}"
        table.add_row(row.name, f"[bold]{row.ratio:.2f}[/]", speed, f"{row.parameters / 1e6:.0f} M", memory)
    console.print(table)


Models = Annotated[list[str], typer.Option("--model", help="Only those whose name contains this; may be repeated.")]
Output = Annotated[Path, typer.Option(help="The CSV file to append to.")]


def chosen(wanted: list[str], among: dict[str, Callable[[Shape], nn.Module]] = MODELS) -> list[str]:
    return [name for name in among if any(part in name for part in wanted)]


@app.command()
def train(
    layers: Annotated[list[int], typer.Option(help="Two depths, for the line to 24.")] = [DEPTH],  # noqa: B006
    tokens: int = TOKENS,
    rounds: int = 2,
    threads: int = 1,
    model: Models = [""],  # noqa: B006
    output: Output = RESULTS,
) -> None:
    torch.set_num_threads(threads)
    trained(chosen(model)[0], 1, 64)  # what only the first of all pays for
    for depth in layers:
        times, sizes = {name: [] for name in chosen(model)}, {}
        for _ in range(rounds):
            for name in times:
                seconds, sizes[name] = trained(name, depth, tokens)
                times[name].append(seconds)
        report(output, threads, rows("train", depth, tokens, tokens, times, sizes))


@app.command()
@torch.inference_mode()
def decode(
    layers: int = DEPTH,
    context: int = CONTEXT,
    rounds: int = 20,
    threads: int = 1,
    model: Models = [""],  # noqa: B006
    output: Output = RESULTS,
) -> None:
    torch.set_num_threads(threads)
    decoders = [Reader(name, layers, context) for name in chosen(model, DECODED)]
    for decoder in decoders:
        decoder.timed()
    times = {decoder.name: [] for decoder in decoders}
    for _ in range(rounds):
        for decoder in decoders:
            times[decoder.name].append(decoder.timed())
    sizes = {decoder.name: decoder.size for decoder in decoders}
    report(output, threads, rows("decode", layers, context, 1, times, sizes))


@app.command()
def prefill(
    layers: int = DEPTH,
    tokens: int = PREFILL,
    threads: int = 1,
    model: Models = ["headrace gla", "headrace softmax-gla"],  # noqa: B006
    output: Output = RESULTS,
) -> None:
    """Each in a process of its own: a peak is never forgotten."""
    for name in chosen(model):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            report(output, threads, [pool.apply(prefilled, (name, layers, tokens, threads))])


if __name__ == "__main__":
    app()
