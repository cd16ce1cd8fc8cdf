"""Language models as large as the GLA paper's 340M, ours and those of transformers, of equal width and depth.

    python benchmarks/model.py train --layers 1 --layers 4     tokens a second: forward, backward and AdamW
    python benchmarks/model.py decode --model mamba2           tokens a second after 4096 tokens of context
    python benchmarks/model.py decode --size 135M --model grouped --context 64    softmax attention with grouped heads
    python benchmarks/model.py released FILE.gguf               the same of a released transformer, in llama.cpp too
    python benchmarks/model.py prompt --size 5M --model gla    tokens a second of a prompt
    python benchmarks/model.py prefill --layers 4              memory over the weights, 100 000 tokens at once; ours

The measurements are those of `headrace bench`: float32 unless a name says otherwise, random weights, all models in turn
in every round, against the first of them. CPU time with one thread, else wall-clock time. Where fewer than 24 layers
were trained, research/docs/benchmarks.md extrapolates to 24 by a straight line through two depths, and says so. Models
that headrace exported run in ONNX Runtime and llama.cpp too, if these are installed (exported.py); a graph of ONNX
Runtime computes the logits of every token of a prompt, all others those of the last.
"""

import itertools
import multiprocessing
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from exported import exported, missing
from exported import released as in_runtimes
from headrace import quantize
from headrace.benchmarking.decoding import READ
from headrace.benchmarking.measure import built, ids, measure, resident
from headrace.benchmarking.models import PEERS, Shape, build
from headrace.benchmarking.plan import BenchPlan, Point
from headrace.layers.blocks.widths import default_intermediate_size
from headrace.report.numbers import spread
from program import Output, console, show
from record import RESULTS as FOLDER
from record import Row, append, environment

RESULTS = FOLDER / "model.csv"
TOKENS, CONTEXT, PROMPT, PREFILL = 2048, 4096, 512, 100_000
MODELS = {  # name in the results -> name in headrace.benchmarking
    **{f"headrace {name}": name for name in ("gla", "softmax-gla", "gated-deltanet", "mamba2")},
    "transformers Mamba2": "transformers-mamba2",
    "transformers Qwen3Next, linear layers alone": "transformers-qwen3-next",
    "transformers Llama": "transformers-llama",
}
# The sizes of the paper, of the recipe laptop-5m, and of SmolLM2-135M.
SIZES = {"340M": Shape(), "5M": Shape(5, 256, 4, 4096), "135M": Shape(30, 576, 9, 49152)}
TOKEN = MODELS | {"headrace rwkv7": "rwkv7-64", "headrace gla, weights in bfloat16": "gla-bfloat16"}  # of decoding
EXPORTED = {"ONNX Runtime": ("gla", "gated-deltanet", "mamba2"), "llama.cpp": ("mamba2", "rwkv7-64")}
PEERS["rwkv7-64"] = lambda shape: build("rwkv7", replace(shape, heads=shape.hidden_size // 64))  # as llama.cpp needs it
GROUP = 3  # query heads that share one of k and v, where their number is a multiple
TOKEN["transformers Llama, grouped"] = "transformers-llama-grouped"
TOKEN |= {f"headrace grouped attention{said}": f"grouped{said}" for said in ("", ", by modules")}
PEERS["gla-bfloat16"] = lambda shape: build("gla", shape).bfloat16()
app = typer.Typer(add_completion=False, help=__doc__)


def grouped(shape: Shape) -> nn.Module:
    return build(f"gqa(kv_heads={shape.heads // GROUP or 1})", shape)


def grouped_by_modules(shape: Shape) -> nn.Module:
    """The same model with a hook, which no program has."""
    model = grouped(shape)
    model.get_submodule("model.backbone.layers.0.mixer.o_proj").register_forward_hook(lambda module, args, out: out)
    return model


def grouped_llama(shape: Shape) -> nn.Module:
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        intermediate_size=default_intermediate_size(shape.hidden_size), num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // GROUP or 1, tie_word_embeddings=True, max_position_embeddings=2**20,
    )  # fmt: skip
    return LlamaForCausalLM(config)


PEERS |= {"grouped": grouped, "grouped, by modules": grouped_by_modules, "transformers-llama-grouped": grouped_llama}


def in_int8(mixer: str, shape: Shape) -> nn.Module:
    """The model with int8 weights; a model on the meta device, which has no values to quantize, as it is."""
    model = build(mixer, shape)
    return model if next(model.parameters()).is_meta else quantize(model)


for mixer in ("gla", "gated-deltanet", "mamba2", "grouped"):
    TOKEN[f"headrace {mixer}, weights in int8"] = f"{mixer}-int8"
    PEERS[f"{mixer}-int8"] = partial(in_int8, mixer)
for runtime, mixers in EXPORTED.items():
    for mixer, (weights, said) in itertools.product(mixers, {"float32": "", "int8": ", weights in int8"}.items()):
        label = f"{runtime} {mixer.removesuffix('-64')}{said}"
        TOKEN[label] = label
        PEERS[label] = partial(exported, runtime, mixer, weights)


def parameters(name: str, shape: Shape) -> int:
    """The number of parameters; for int8 weights, that of the model before quantizing."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(name, shape).parameters())


def timed(what: str, point: Point, plan: BenchPlan, models: dict[str, str]) -> list[Row]:
    measured = dict(zip(models, measure(point, plan).values(), strict=True))
    for label in (label for label, one in measured.items() if "seconds" not in one):
        console.print(f"[dim]not timed: {label}: {measured[label]['left_out']}[/]")
    times = {label: one["seconds"] for label, one in measured.items() if "seconds" in one}
    if not times:
        raise SystemExit(f"{what}: no model was timed")
    first, base = next(iter(times.items()))
    return [
        row(what, models[label], label, point, plan) | {
            "rounds": len(seconds), "seconds": round(median(seconds), 5),
            "tokens_per_second": round(point.tokens / median(seconds), 2), "spread": round(spread(seconds) or 0.0, 3),
            "ratio": round(median(x / y for x, y in zip(seconds, base, strict=True)), 3), "over": first, "peak_mb": 0.0,
        }
        for label, seconds in times.items()
    ]  # fmt: skip


def row(what: str, name: str, label: str, point: Point, plan: BenchPlan) -> Row:
    """tokens: in a row of a training step, in the context, or in the prompt."""
    sizes = {"parameters": parameters(name, plan.shape), "layers": plan.shape.layers, "width": plan.shape.hidden_size}
    return {"what": what, "name": label, **sizes, "tokens": point.length, "batch": point.batch}


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
    return row("prefill", name, label, Point("prefill", tokens), plan) | {
        "rounds": 1, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1), "spread": 0.0,
        "ratio": 1.0, "over": label, "peak_mb": round(peak / 1e6, 1),
    }  # fmt: skip


def report(output: Path, threads: int, rows: list[Row]) -> None:
    append(output, environment() | {"threads": threads}, rows)
    lines = [
        [x["name"], f"[bold]{x['ratio']:.2f}[/]", f"{x['tokens_per_second']:.1f} ±{x['spread']:.0%}",
         f"{x['parameters'] / 1e6:.0f} M", f"{x['peak_mb']:.0f}" if x["peak_mb"] else ""]
        for x in rows
    ]  # fmt: skip
    title = "{what}, {layers} layers, {tokens} tokens, batch {batch}".format(**rows[0])
    show(title, ["", "time / the first", "tokens/s", "parameters", "MB over the weights"], lines)


Models = Annotated[list[str], typer.Option("--model", help="Only those whose name contains this; may be repeated.")]


def select(parts: list[str], among: dict[str, str]) -> dict[str, str]:
    """Those that can run here; of the others it says why not."""
    chosen = {label: name for label, name in among.items() if any(part in label for part in parts)}
    runtimes = {label: runtime for label in chosen for runtime in EXPORTED if label.startswith(runtime)}
    reasons = {label: missing(runtime) for label, runtime in runtimes.items()}
    for label in (label for label, reason in reasons.items() if reason):
        console.print(f"[dim]not timed: {label}: {reasons[label]}[/]")
        del chosen[label]
    if not chosen:
        expected = "expected a part of the name of a model that can run here"
        raise typer.BadParameter(f"{parts}; {expected}", param_hint="--model")
    return chosen


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
        plan = BenchPlan(tuple(models.values()), replace(SIZES["340M"], layers=depth), threads=threads, rounds=rounds)
        report(output, threads, timed("train", Point("training", tokens), plan, models))


def of_tokens(
    what: str, point: Point, models: dict[str, str], shape: Shape, rounds: int, threads: int, output: Path
) -> None:
    plan = BenchPlan(tuple(models.values()), shape, threads=threads, rounds=rounds)
    report(output, threads, timed(what, point, plan, models))


Size = Annotated[str, typer.Option(help=f"{' or '.join(SIZES)}.")]


@app.command()
def decode(
    size: Size = "340M",
    context: int = CONTEXT,
    batch: int = 1,
    rounds: int = 5,
    threads: int = 1,
    model: Models = [""],  # noqa: B006
    output: Output = RESULTS,
) -> None:
    """A token of each of `batch` sequences."""
    of_tokens("decode", Point("decoding", context, batch), select(model, TOKEN), SIZES[size], rounds, threads, output)


@app.command()
def released(file: Path, rounds: int = 5, threads: int = 1, output: Output = RESULTS) -> None:
    """A token of the model of a GGUF file after 64 tokens, which every model reads."""
    with TemporaryDirectory() as folder:
        models = in_runtimes(file, Path(folder))
        PEERS.update({name: lambda shape, model=model: model for name, model in models.items()})
        config, size = models["headrace"].config, models["headrace"].num_parameters()
        shape = Shape(config.num_hidden_layers, config.hidden_size, config.num_heads, config.vocab_size)
        plan = BenchPlan(tuple(models), shape, threads=threads, rounds=rounds)
        labels = {re.sub(r"^[^,]+", rf"\g<0> {file.stem}", name): name for name in models}
        rows = timed("decode", Point("decoding", READ), plan, labels)
    report(output, threads, [row | {"parameters": size} for row in rows])


@app.command()
def prompt(
    size: Size = "340M",
    tokens: int = PROMPT,
    rounds: int = 5,
    threads: int = 1,
    model: Models = [""],  # noqa: B006
    output: Output = RESULTS,
) -> None:
    of_tokens("prompt", Point("prefill", tokens), select(model, TOKEN), SIZES[size], rounds, threads, output)


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
        plan = BenchPlan((name,), replace(SIZES["340M"], layers=layers), threads=threads, rounds=1)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            report(output, threads, [pool.apply(prefilled, (label, plan, tokens))])


if __name__ == "__main__":
    app()
