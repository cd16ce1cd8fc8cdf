"""The commands for training: prepare, train, and what a recipe would cost."""

import json
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .console import AcceptOld

GIGA = 1e9


def prepare(
    output: Annotated[Path, typer.Option(help="The folder to make.")],
    sources: Annotated[
        list[str] | None, typer.Argument(help="Text, jsonl or parquet files, or one data set of the Hub.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="File, folder or Hub name; bytes without one.")] = None,
    train_bpe: Annotated[int | None, typer.Option(help="Learn a vocabulary of this size from the data.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per row; 4096 of text without it.")] = None,
    held_out: Annotated[
        float | None, typer.Option(help="Share of the documents, or of the text of a few; 0.001 without it.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="In jsonl, parquet and on the Hub; text without it.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of held-out documents, or of the rows.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    task: Annotated[str | None, typer.Option(help="In place of text: needle(kind=2, length=1024), mqar, …")] = None,
    rows: Annotated[int | None, typer.Option(help="Of the task; 10,000 without it.")] = None,
) -> None:
    """Tokenise and pack text for training, or draw rows of a task whose answers alone are learnt."""
    from ..data import Preparation
    from ..data import prepare as run
    from ..utils.errors import InputError
    from .console import interruptible

    if bool(sources) == (task is not None):
        raise InputError("prepare takes sources of text, or --task; expected one of them")
    ours = {"tokenizer": tokenizer, "length": length}
    of_text, of_task = {"bpe": train_bpe, "held_out": held_out, "column": column}, {"rows": rows}
    idle = given(of_text if task is not None else of_task)
    if idle:
        name = "train-bpe" if "bpe" in idle else next(iter(idle)).replace("_", "-")
        raise InputError(f"--{name} means nothing {'to a task' if task is not None else 'without --task'}")
    with interruptible(f"{output} was not made; nothing was kept"):
        if task is None:
            plan = Preparation(tuple(sources or ()), seed=seed, workers=workers, **given(ours | of_text))
            manifest = run(plan, output)
        else:
            from ..studies.compare.choose import default, refined
            from ..tasks.prepared import prepare as draw

            chosen = refined(default(task).task, given(ours))
            manifest = draw(chosen, task, 10000 if rows is None else rows, seed, workers, output)
    table = Table("", "documents", "tokens", "rows", "bytes")
    for part in ("train", "held_out"):
        counts = manifest[part]
        table.add_row(part, *(f"{counts[name]:,}" for name in ("documents", "tokens", "rows", "bytes")))
    Console().print(table)
    speed = f"{manifest['megabytes_per_second']} MB/s; " if task is None else ""
    print(f"{speed}{output} is ready")


def given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def train(
    recipe: Annotated[str, typer.Argument(help="A name (see `headrace recipes`) or a YAML file.")],
    settings: Annotated[list[str] | None, typer.Argument(help="FIELD=VALUE …", show_default=False)] = None,
    data: Annotated[Path | None, typer.Option(help="What `headrace prepare` made.")] = None,
    output: Annotated[Path | None, typer.Option(help="The run's folder; runs/<recipe>-<mixer> without one.")] = None,
    mixer: Annotated[str | None, typer.Option(help="A name or expression: see `headrace zoo`.")] = None,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard the model over the processes of torchrun.")] = False,
    trackers: Annotated[str, typer.Option(help="tensorboard, wandb, trackio, none, or several.")] = "tensorboard",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would cost.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The dry run as JSON.")] = False,
    accept_old: AcceptOld = False,
) -> None:
    """Train a language model. The same command, after whatever interrupted it, goes on where the last checkpoint is.

    Ctrl-C and SIGTERM end the run after the step at hand, with a checkpoint: exit codes 130 and 143."""
    from ..training import recipes
    from ..utils.errors import InputError
    from .console import interruptible

    changes = recipes.changes(settings or []) | ({} if mixer is None else {"mixer": mixer})
    chosen, about = recipes.load(recipe, changes)
    if dry_run or as_json:
        say_costs(chosen, about, as_json)
        return
    if data is None:
        raise InputError("--data is missing; expected a folder made by `headrace prepare`")
    from ..data import open_data
    from ..training.run import train as run

    folder = output or Path("runs", f"{Path(recipe).stem}-{chosen.mixer}")
    with interruptible(f"{folder} keeps what was learnt up to its newest checkpoint; the same command goes on"):
        run(chosen, about, open_data(data), folder, fsdp, trackers, accept_old)


def curves(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `train` wrote, or is still writing.")],
    output: Annotated[Path, typer.Option(help="The picture, a PNG, PDF or SVG file.")] = Path("curves.png"),
) -> None:
    """Draw the loss of several runs by step, in one picture."""
    from ..training.card import draw_curves, named, read_history

    draw_curves(output, {name: read_history(run) for name, run in named(runs).items()})
    print(f"{output} shows {len(runs)} run{'s' if len(runs) > 1 else ''}")


def say_costs(recipe: Any, about: Any, as_json: bool) -> None:
    from dataclasses import asdict

    from ..training.model import estimate

    costs = estimate(recipe)
    if as_json:
        print(json.dumps({"recipe": asdict(recipe), **asdict(about), **costs}, indent=1))
        return
    table = Table(show_header=False, title=f"{recipe.mixer}, {recipe.layers} layers of {recipe.hidden_size}")
    for name, number in costs["parameters"].items():
        table.add_row(f"parameters, {name}", f"{number / 1e6:,.2f} M")
    table.add_row("steps", f"{costs['steps']:,} of {costs['rows_per_step']} rows, {costs['warmup_steps']:,} to warm up")
    table.add_row("tokens", f"{costs['tokens']:,}")
    table.add_row("operations", f"{costs['flops_per_token'] / GIGA:,.2f} G a token, {costs['flops']:.2e} in all")
    for name, number in costs["bytes"].items():
        table.add_row(f"memory, {name}", f"{number / 2**30:,.2f} GiB")
    table.add_row("assumed", ", ".join(about.assumed) or "nothing")
    Console().print(table)


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A folder written by `train` or save_pretrained.")],
    prompt: Annotated[str | None, typer.Option(help="Without one, standard input.")] = None,
    tokens: Annotated[int, typer.Option(help="How many at most.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, as many as weigh this.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of the likeliest tokens, so many; 0: all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option()] = None,
    device: Annotated[str | None, typer.Option(help="The accelerator without it, where there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Text, tokens and speed, at the end.")] = False,
) -> None:
    """Continue a text, token by token."""
    from ..hf.generate import generate as run
    from ..hf.generate import read_prompt, sampling_settings

    sampling = sampling_settings(tokens, temperature, top_p, top_k, repetition_penalty)
    result = run(checkpoint, read_prompt(prompt), seed, not as_json, device, **sampling)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(f"{len(result['tokens'])} tokens, {result['tokens_per_second']:.1f} a second", file=sys.stderr)


# Of a checkpoint, what is no weight and no config: its tokenizer in any of its forms, and how it generates.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors.")],
    output: Annotated[Path, typer.Option(help="The folder to make.")],
    to: Annotated[
        str | None, typer.Option(help="A foreign format; without it a foreign checkpoint is brought in.")
    ] = None,
) -> None:
    """Bring a checkpoint in from transformers or flash-linear-attention, or take one of ours out to them."""
    from ..hf.convert import bring_in, take_out
    from ..hf.model import load
    from ..utils.processes import new_folder

    with new_folder(output) as folder:
        if to is None:
            bring_in(checkpoint).save_pretrained(folder)
        else:
            take_out(load(checkpoint), to, folder)
        for name in BESIDE:
            if (checkpoint / name).is_file():
                shutil.copy(checkpoint / name, folder / name)
    print(f"{output} is what {checkpoint} is, as {to or 'headrace'}")


def serve(
    checkpoint: Annotated[Path, typer.Argument(help="A folder written by `train` or save_pretrained.")],
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: one that is free.")] = 8000,
    longest: Annotated[int, typer.Option(help="Tokens of a prompt; longer ones are refused.")] = 32768,
    tokens: Annotated[int, typer.Option(help="Of an answer; requests for more are refused.")] = 4096,
    waiting: Annotated[int, typer.Option(help="Requests; more are refused for the moment.")] = 64,
    device: Annotated[str | None, typer.Option(help="The accelerator without it, where there is one.")] = None,
) -> None:
    """Serve a model as OpenAI's API does: completions, and chats where its tokenizer has a template; one at a time.

    There is no password and no encryption: beyond this machine, put it behind a proxy that has them."""
    from ..hf.serving import Limits
    from ..hf.serving import serve as run
    from ..utils.errors import InputError
    from .console import interruptible

    for name, value, least in (("longest", longest, 1), ("tokens", tokens, 1), ("waiting", waiting, 0)):
        if value < least:
            raise InputError(f"--{name}={value}; expected at least {least}")
    with interruptible("the server has ended"):
        run(checkpoint, host, port, Limits(longest, tokens, waiting), device)


def retrofit(
    checkpoint: Annotated[Path, typer.Argument(help="A folder written by `train` or save_pretrained.")],
    output: Annotated[Path, typer.Option(help="The folder to make.")],
) -> None:
    """Let the heads of a trained model compete: the same outputs at first, gates that can learn."""
    from ..hf.generate import read_tokenizer
    from ..hf.retrofit import retrofit as run
    from ..utils.processes import new_folder

    with new_folder(output) as folder:
        for part in (run(checkpoint), read_tokenizer(checkpoint)):
            part.save_pretrained(folder)
    print(f"{output} computes what {checkpoint} does; its gates are ready to be trained")


def list_recipes(
    mixers: Annotated[str | None, typer.Option(help="With commas between: count the parameters of each.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The counts as in docs/recipes.md.")] = False,
) -> None:
    """List the recipes that come with headrace, or what models of them would hold."""
    from .. import zoo
    from ..training import recipes

    if mixers is not None:
        say_parameters(zoo.several(mixers), as_markdown)
        return
    table = Table("recipe", "width", "layers", "heads", "tokens", "tokens a step")
    for name in recipes.names():
        one, _ = recipes.load(name)
        table.add_row(name, *map(str, (one.hidden_size, one.layers, one.heads, f"{one.tokens:g}", one.batch_tokens)))
    Console().print(table)


def say_parameters(mixers: tuple[str, ...], as_markdown: bool) -> None:
    """Millions, of every shipped recipe with every mixer."""
    from ..training import recipes
    from ..training.model import blank, count

    head = ("recipe", "mixer", "body", "competition", "tied", "untied")
    rows = []
    for name, mixer in product(recipes.names(), mixers):
        counted = count(blank(recipes.load(name, {"mixer": mixer})[0]))
        rows.append((name, mixer, *(f"{counted[part] / 1e6:,.2f}" for part in head[2:])))
    if as_markdown:
        for line in (head, ("---", "---", *["--:"] * 4), *rows):
            print(f"| {' | '.join(line)} |")
        return
    table = Table(*head[:2], title="parameters, millions")
    for part in head[2:]:
        table.add_column(part, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
