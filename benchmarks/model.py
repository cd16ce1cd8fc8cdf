"""Language models as large as the GLA paper's 340M, ours and those of transformers, of equal width and depth.

    python benchmarks/model.py train --layers 1 --layers 4     tokens a second: forward, backward and AdamW
    python benchmarks/model.py decode                          tokens a second after 4096 tokens of context
    python benchmarks/model.py prefill --layers 4              memory over the weights, 100 000 tokens at once; ours

The measurements are those of `headrace bench`: vocabulary 32 000, float32, random weights, all models in turn in every
round. CPU time with one thread, else wall-clock time. Where fewer than 24 layers were trained, docs/benchmarks.md
extrapolates to 24 by a straight line through two depths, and says so.
"""

import multiprocessing
import time
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
from headrace.studies.bench.measure import built, ids, measure, resident
from headrace.studies.bench.models import PEERS, Shape, build, ours
from headrace.studies.bench.plan import BenchPlan, Point
from headrace.studies.report.numbers import spread
from record import append, environment

RESULTS = Path(__file__).parent / "results" / "model.csv"
TOKENS, CONTEXT, PREFILL = 2048, 4096, 100_000
MODELS = {  # name in the results -> name in headrace.studies.bench
    **{f"headrace {name}": name for name in ("gla", "softmax-gla", "gated-deltanet", "mamba2")},
    "transformers Mamba2": "transformers-mamba2",
    "transformers Qwen3Next, linear layers alone": "transformers-qwen3-next",
    "transformers Llama": "transformers-llama",
}
NARROW = {"headrace gla, weights in bfloat16": "gla-bfloat16", "headrace gla, weights in int8": "gla-int8"}
PEERS["gla-bfloat16"] = lambda shape: ours("gla", shape).bfloat16()
PEERS["gla-int8"] = lambda shape: in_int8(ours("gla", shape))
console = Console(width=None if Console().is_terminal else 120)
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Row:
    what: str  # train, decode or prefill
    name: str
    parameters: int
    layers: int
    tokens: int  # of a training step, of the context, or of the prompt
    rounds: int
    seconds: float  # of a training step, of a decoded token, or of the prefill
    tokens_per_second: float
    spread: float
    ratio: float  # seconds over those of the first of ours
    peak_mb: float  # prefill: peak memory of the process minus its memory with the weights alone


def in_int8(model: nn.Module) -> nn.Module:
    """The model with int8 weights; a model on the meta device, which has no values to quantise, as it is."""
    return model if next(model.parameters()).is_meta else quantize(model)


def parameters(name: str, shape: Shape) -> int:
    """The number of parameters; for int8 weights, that of the model before quantising."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, shape).parameters())


def timed(what: str, point: Point, plan: BenchPlan, models: dict[str, str]) -> list[Row]:
    times = {label: found["seconds"] for label, found in zip(models, measure(point, plan).values(), strict=True)}
    base = next(iter(times.values()))
    return [
        Row(
            what, label, parameters(models[label], plan.shape), plan.shape.layers, point.length, len(seconds),
            round(median(seconds), 5), round(point.tokens / median(seconds), 2), round(spread(seconds) or 0.0, 3),
            round(median(x / y for x, y in zip(seconds, base, strict=True)), 3), 0.0,
        )
        for label, seconds in times.items()
    ]  # fmt: skip


def prefilled(label: str, plan: BenchPlan, tokens: int) -> Row:
    torch.set_num_threads(plan.threads)
    (name,) = plan.models
    model = built(name, plan).eval()
    with torch.inference_mode():
        model(input_ids=ids(64, 1, plan), use_cache=True, logits_to_keep=1)
        before, start = resident("VmRSS"), time.perf_counter()
        model(input_ids=ids(tokens, 1, plan), use_cache=True, logits_to_keep=1)
    seconds, peak = time.perf_counter() - start, resident("VmHWM") - before
    return Row("prefill", label, parameters(name, plan.shape), plan.shape.layers, tokens, 1, round(seconds, 3),
               round(tokens / seconds, 1), 0.0, 1.0, round(peak / 1e6, 1))  # fmt: skip


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


def select(wanted: list[str], among: dict[str, str]) -> dict[str, str]:
    return {label: name for label, name in among.items() if any(part in label for part in wanted)}


def plan_of(models: dict[str, str], layers: int, threads: int, rounds: int) -> BenchPlan:
    return BenchPlan(tuple(models.values()), Shape(layers), threads=threads, rounds=rounds)


@app.command()
def train(
    layers: Annotated[list[int], typer.Option(help="Two depths, for the line to 24.")] = [Shape.layers],  # noqa: B006
    tokens: int = TOKENS,
    rounds: int = 2,
    threads: int = 1,
    model: Models = [""],  # noqa: B006
    output: Output = RESULTS,
) -> None:
    models = select(model, MODELS)
    for depth in layers:
        plan = plan_of(models, depth, threads, rounds)
        report(output, threads, timed("train", Point("training", tokens), plan, models))


@app.command()
def decode(
    layers: int = Shape.layers,
    context: int = CONTEXT,
    rounds: int = 5,
    threads: int = 1,
    model: Models = [""],  # noqa: B006
    output: Output = RESULTS,
) -> None:
    models = select(model, MODELS | NARROW)
    plan = plan_of(models, layers, threads, rounds)
    report(output, threads, timed("decode", Point("decoding", context), plan, models))


@app.command()
def prefill(
    layers: int = Shape.layers,
    tokens: int = PREFILL,
    threads: int = 1,
    model: Models = ["headrace gla", "headrace softmax-gla"],  # noqa: B006
    output: Output = RESULTS,
) -> None:
    """Each model in its own process, because the peak of a process never falls."""
    for label, name in select(model, MODELS).items():
        plan = plan_of({label: name}, layers, threads, 1)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            report(output, threads, [pool.apply(prefilled, (label, plan, tokens))])


if __name__ == "__main__":
    app()
