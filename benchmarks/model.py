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
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from torch import nn

from headrace import quantize
from headrace.studies.bench.measure import built, ids, measure, resident
from headrace.studies.bench.models import PEERS, Shape, build, ours
from headrace.studies.bench.plan import BenchPlan, Point
from headrace.studies.report.numbers import spread
from program import Output, show
from record import RESULTS as FOLDER
from record import Row, append, environment

RESULTS = FOLDER / "model.csv"
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
app = typer.Typer(add_completion=False, help=__doc__)


def in_int8(model: nn.Module) -> nn.Module:
    """The model with int8 weights; a model on the meta device, which has no values to quantise, as it is."""
    return model if next(model.parameters()).is_meta else quantize(model)


def parameters(name: str, shape: Shape) -> int:
    """The number of parameters; for int8 weights, that of the model before quantising."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, shape).parameters())


def timed(what: str, point: Point, plan: BenchPlan, models: dict[str, str]) -> list[Row]:
    times = {label: measured["seconds"] for label, measured in zip(models, measure(point, plan).values(), strict=True)}
    base = next(iter(times.values()))
    return [
        row(what, models[label], label, point.length, plan) | {
            "rounds": len(seconds), "seconds": round(median(seconds), 5),
            "tokens_per_second": round(point.tokens / median(seconds), 2), "spread": round(spread(seconds) or 0.0, 3),
            "ratio": round(median(x / y for x, y in zip(seconds, base, strict=True)), 3), "peak_mb": 0.0,
        }
        for label, seconds in times.items()
    ]  # fmt: skip


def row(what: str, name: str, label: str, tokens: int, plan: BenchPlan) -> Row:
    """tokens: of a training step, of the context, or of the prompt."""
    sizes = {"parameters": parameters(name, plan.shape), "layers": plan.shape.layers, "tokens": tokens}
    return {"what": what, "name": label, **sizes}


def prefilled(label: str, plan: BenchPlan, tokens: int) -> Row:
    """peak_mb: peak memory of the process minus its memory with the weights alone."""
    torch.set_num_threads(plan.threads)
    (name,) = plan.models
    model = built(name, plan).eval()
    with torch.inference_mode():
        model(input_ids=ids(64, 1, model), use_cache=True, logits_to_keep=1)
        before, start = resident("VmRSS"), time.perf_counter()
        model(input_ids=ids(tokens, 1, model), use_cache=True, logits_to_keep=1)
    seconds, peak = time.perf_counter() - start, resident("VmHWM") - before
    return row("prefill", name, label, tokens, plan) | {
        "rounds": 1, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1), "spread": 0.0,
        "ratio": 1.0, "peak_mb": round(peak / 1e6, 1),
    }  # fmt: skip


def report(output: Path, threads: int, rows: list[Row]) -> None:
    append(output, environment() | {"threads": threads}, rows)
    lines = [
        [x["name"], f"[bold]{x['ratio']:.2f}[/]", f"{x['tokens_per_second']:.1f} ±{x['spread']:.0%}",
         f"{x['parameters'] / 1e6:.0f} M", f"{x['peak_mb']:.0f}" if x["peak_mb"] else ""]
        for x in rows
    ]  # fmt: skip
    title = "{what}, {layers} layers, {tokens} tokens".format(**rows[0])
    show(title, ["", "time / ours", "tokens/s", "parameters", "MB over the weights"], lines)


Models = Annotated[list[str], typer.Option("--model", help="Only those whose name contains this; may be repeated.")]


def select(parts: list[str], among: dict[str, str]) -> dict[str, str]:
    return {label: name for label, name in among.items() if any(part in label for part in parts)}


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
