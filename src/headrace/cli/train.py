"""Train: prepare, train, curves, recipes."""

import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from .. import zoo
from ..files.hub import ask_hub, is_on_the_hub, tokenizer_is_elsewhere
from ..files.processes import MOST
from ..utils.errors import InputError
from .console import interruptible, refuse_idle, terminal
from .options import NewFolder, argument, option, setting, takes

GIGA = 1e9
PICTURES = (".png", ".pdf", ".svg")
OF_TEXT = ("train_bpe", "held_out", "column", "tokens", "sample")  # options of `prepare` that no task has


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `headrace prepare`."""

    output: NewFolder
    sources: list[str] | None = setting(
        "Text or JSON Lines files (also .gz, .zst, .bz2, .xz), Parquet files, or one data set: a folder or a name "
        "on the Hub.",
        shown="none, with --task",
        kind=argument,
    )
    tokenizer: str | None = setting(
        "Tokenizer: bytes, a file (tokenizer.json or GGUF), a folder or a name on the Hub.", shown="bytes"
    )
    train_bpe: int | None = setting("Vocabulary size of a BPE tokenizer to train on the data.")
    length: int | None = setting("Tokens per row.", shown="4096; with --task, the task's")
    held_out: float | None = setting(
        "Fraction of the documents that is held out for evaluation. With fewer than 20 documents, or if this is less "
        "than half of one, pieces from all over the text are held out.",
        shown="0.001",
    )
    column: str | None = setting("Column of the text in JSON Lines, Parquet and on the Hub.", shown="text")
    seed: int = setting("Random seed of the sample, the held-out documents or the task's rows.", 0, least=0)
    workers: int = setting("Number of worker processes.", 1, least=1, most=MOST)
    task: str | None = setting("Task to draw rows from instead of text: mqar, needle(kind=2, length=1024), ...")
    rows: int | None = setting("Number of rows of the task.", shown="10000", least=1)
    tokens: float | None = setting("Number of training tokens at which to stop.", shown="all of the text")
    sample: float | None = setting(
        "Share of the documents to keep, chosen at random, by --seed, from files in random order. 1 keeps "
        "whole files; a smaller share reads more files.",
        shown="all documents in order",
    )

    def __post_init__(self) -> None:
        if bool(self.sources) == (self.task is not None):
            both_or_neither = "both text sources and" if self.sources else "neither text sources nor"
            raise InputError(f"prepare has {both_or_neither} --task; expected one of them")
        if self.task is None:
            refuse_idle("without --task", rows=self.rows)
        else:
            refuse_idle("with --task", **{name: getattr(self, name) for name in OF_TEXT})
            if twice := self.given("tokenizer", "length").keys() & zoo.expression(self.task, "--task")[1]:
                raise InputError(f"{min(twice)!r} is set twice, by --task and --{min(twice)}; expected it once")
        if self.tokens is not None and not (float(self.tokens).is_integer() and self.tokens < 2**63):
            raise InputError(f"--tokens {self.tokens:g}; expected an integer of less than 2^63")

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these options that are set."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@takes(PrepareOptions)
def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Tokenize text for `headrace train`, or draw rows of a task.

    In rows of a task, only the answers contribute to the loss."""
    one, output = options, options.output
    if any(map(is_on_the_hub, one.sources or ())) or tokenizer_is_elsewhere(one.tokenizer):
        ask_hub()
    from ..data import Preparation
    from ..data import prepare as run

    with interruptible(f"{output} was not created"):
        if one.task is None:
            tokens = None if one.tokens is None else int(one.tokens)
            own = one.given("tokenizer", "length", "held_out", "column", "sample")
            sources = tuple(one.sources or ())
            plan = Preparation(sources, seed=one.seed, workers=one.workers, bpe=one.train_bpe, tokens=tokens, **own)
            manifest = run(plan, output)
        else:
            from ..comparison.choose import default
            from ..comparison.defaults import refined
            from ..tasks.prepared import prepare as draw

            chosen = refined(default(one.task).task, one.given("tokenizer", "length"))
            manifest = draw(chosen, one.task, 10000 if one.rows is None else one.rows, one.seed, one.workers, output)
    print_counts(manifest)
    speed = f"{manifest['megabytes_per_second']} MB/s; " if one.task is None else ""
    print(f"{speed}{output} is ready")
    return manifest


def print_counts(manifest: dict[str, Any]) -> None:
    """Prints the numbers of documents, tokens, rows and bytes of prepared data."""
    from ..data.held_out import FEW
    from ..data.parts import left_out
    from ..report.numbers import count

    names = ("documents", "tokens", "rows", "bytes")
    table = Table("", *names)
    for part in ("train", "held_out"):
        table.add_row(part, *(f"{manifest[part][name]:,}" for name in names))
    terminal().print(table)
    if pieces := manifest.get("held_out_pieces"):
        share = manifest["held_out_share"]
        enough = f"--held-out {share:g} takes whole documents if there are {max(FEW, int(0.5 / share) + 1):,} or more"
        print(f"held out: {count(pieces, 'piece')} from all over the text; {enough}")
    for sentence in left_out(manifest.get("bad_rows", {})):
        print(sentence)


@dataclass(frozen=True)
class TrainOptions:
    """The options of `headrace train`."""

    recipe: str = setting("Recipe: a name (see `headrace recipes`) or a YAML file.", ..., kind=argument)
    settings: list[str] | None = setting(
        "Changes to fields of the recipe: FIELD=VALUE ...", kind=argument, show_default=False
    )
    data: Path | None = setting(
        "Folder that `headrace prepare` wrote. A laptop recipe takes its row length and vocabulary size.",
        shown="none; required except with --dry-run",
    )
    output: Path | None = setting("Folder of the run.", shown="runs/<recipe>-<mixer>")
    mixer: str | None = setting(
        "Mixer: a name or expression (see `headrace zoo`), or checkpoint: the layers and sizes of `weights`.",
        shown="the recipe's",
    )
    trackers: str = setting("Trackers, separated by commas: tensorboard, wandb, trackio; or none.", "none")
    timeout: int = setting("Seconds that a process of torchrun waits for the others before it ends the run.", 1800)
    dry_run: bool = setting("Dry run: print parameters, FLOPs, memory and time, and train nothing.", False, "--dry-run")
    machine: str | None = setting(
        "Machine of the dry run, such as 8xH100 or 4x8xH100: print layout, memory per device and days."
    )
    efficiency: float | None = setting(
        "Fraction of the machine's peak FLOPs that the dry run assumes.",
        shown="measured on one H200; of another mixer, the median",
    )
    as_json: bool = setting("JSON output of the dry run.", False, "--json")

    def __post_init__(self) -> None:
        from ..training.recipes import CHECKPOINT

        if (mixer := self.changes.get("mixer", CHECKPOINT)) != CHECKPOINT:
            zoo.get(mixer)  # raises for a misspelt one before PyTorch is imported, which takes seconds
        if self.machine is None:
            refuse_idle("without --machine", efficiency=self.efficiency)
        elif not (self.dry_run or self.as_json):
            raise InputError(f"--machine={self.machine} without --dry-run; expected it with --dry-run or --json")

    @property
    def changes(self) -> dict[str, Any]:
        """Changes to the recipe by field."""
        from ..training.recipes import assignments

        return assignments([*(self.settings or []), *([] if self.mixer is None else [f"mixer={self.mixer}"])])


@takes(TrainOptions)
def train(options: TrainOptions) -> Path | None:
    """Train a language model by a recipe.

    After an interruption, the same command resumes from the last checkpoint. Ctrl-C and SIGTERM, by which a scheduler
    ends a job, finish the current step and write a checkpoint; the exit code is then 130 or 0. The trained model is in
    OUTPUT/model only at the end of a run."""
    from ..data import open_data, read_manifest
    from ..training import recipes

    one = options
    chosen, about = recipes.load(one.recipe, one.changes, None if one.data is None else read_manifest(one.data))
    if one.dry_run or one.as_json:
        from ..training import machine as machines

        if one.data is not None:
            from ..training.run import check_data

            check_data(chosen, open_data(one.data))
        plan = None if one.machine is None else machines.plan(chosen, machines.parse(one.machine), one.efficiency)
        print_costs(chosen, about, plan, one.as_json)
        return None
    if one.data is None:
        raise InputError("--data is missing; expected a folder made by `headrace prepare`")
    from ..training.run import train as run

    folder = one.output or Path("runs", f"{Path(one.recipe).stem}-{chosen.mixer}")
    with interruptible(f"{folder} keeps the newest checkpoint; the same command continues from it", terminated=0):
        run(chosen, about, one.data, folder, one.trackers, one.timeout)
    return folder / "model"


def curves(
    runs: Annotated[list[Path], argument("Folders of runs that `headrace train` wrote or is writing.")],
    output: Annotated[Path, option("Image file to write: PNG, PDF or SVG.")] = Path("curves.png"),
) -> None:
    """Plot the loss of several runs against the training step."""
    from ..files.results import short_names
    from ..training.card import draw_curves, read_history

    if output.suffix.lower() not in PICTURES:
        raise InputError(f"--output {str(output)!r}; expected a file that ends in one of {', '.join(PICTURES)}")
    drawn = {name: read_history(Path(run)) for name, run in short_names([*map(str, runs)], "run").items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(output, drawn)
    print(f"{output} shows {len(runs)} run{'s' if len(runs) > 1 else ''}")


def print_costs(recipe: Any, about: Any, plan: dict[str, Any] | None, as_json: bool) -> None:
    """Prints parameters, steps, FLOPs and memory of a recipe. plan: what it needs of a machine, of `machine.plan`."""
    from ..training.machine import time_here
    from ..training.model import estimate

    costs = estimate(recipe)
    elsewhere = {"here": time_here(recipe)} if plan is None else {"machine": plan}
    if as_json:
        print(json.dumps({"recipe": asdict(recipe), **asdict(about), **costs, **elsewhere}, indent=1))
        return
    table = Table(show_header=False, title=f"{recipe.mixer}, {recipe.layers} layers of {recipe.hidden_size}")
    for name, number in costs["parameters"].items():
        table.add_row(f"parameters, {name}", f"{number / 1e6:,.2f} M")
    table.add_row("steps", f"{costs['steps']:,} of {costs['rows_per_step']} rows, {costs['warmup_steps']:,} of warm-up")
    table.add_row("tokens", f"{costs['tokens']:,}")
    table.add_row("FLOPs", f"{costs['flops_per_token'] / GIGA:,.2f} G per token, {costs['flops']:.2e} in total")
    parts = {name: size for name, size in costs["kept_per_token"].items() if name}
    layers = ", ".join(f"{name} {size / recipe.layers:,.0f}" for name, size in parts.items())
    table.add_row("kept per token and layer", f"{sum(parts.values()) / recipe.layers:,.0f} bytes, uncompiled: {layers}")
    for name, number in (costs if plan is None else plan)["bytes"].items():
        table.add_row(f"memory, {name}", f"{number / 2**30:,.2f} GiB")
    for name, text in ({"time": time_row(elsewhere["here"])} if plan is None else machine_rows(plan)).items():
        table.add_row(name, text)
    for reason, layers in costs["layers_without_gpu_kernel"].items():
        table.add_row("no GPU kernel", f"{len(layers)} of {recipe.layers} layers: {reason}; PyTorch computes them")
    table.add_row("assumed", ", ".join(about.assumed) or "nothing")
    terminal().print(table)


def time_row(here: dict[str, Any]) -> str:
    """The row of the dry run's table about the time on this machine."""
    from ..training.history import duration

    how = "of matrix products, measured now" if here["measured"] else "by its data sheet"
    rate = f"{here['flops_per_second'] / GIGA:,.0f} GFLOP/s {how}"
    return (
        f"about {duration(here['seconds'])} on this machine's {here['device']}, at {here['efficiency']:.0%} of {rate}: "
        "an assumption"
    )


def machine_rows(plan: dict[str, Any]) -> dict[str, str]:
    """The rows of the dry run's table about a machine."""
    needed, available = sum(plan["bytes"].values()) / 2**30, plan["bytes_of_device"] / 2**30
    no = "does not fit; expected a smaller micro_batch, recompute=true, a larger shard, or other devices"
    layout = f"{plan['data_parallel']} × {plan['context_parallel']} per row, weights over {plan['shard']}"
    reached = f"{plan['efficiency']:.0%} of the peak, {plan['efficiency_source']}"
    return {
        "memory per device": f"{needed:,.1f} of {available:,.1f} GiB: {'fits' if plan['fits'] else no}",
        "devices": f"{plan['devices']} {plan['device']}: {layout}",
        "rows per device": f"{plan['rows_per_pass']} in a pass, passes in a step: {plan['passes_per_step']}",
        "time": f"{plan['days']:,.2f} days, {plan['tokens_per_second']:,.0f} tokens/s, at {reached}",
    }


def list_recipes(
    mixers: Annotated[
        str | None,
        option("Mixers, separated by commas, or all: print each recipe's parameters with each mixer.", default="none"),
    ] = None,
) -> None:
    """List the recipes of headrace, or the parameter counts of their models."""
    from ..training import recipes

    if mixers is not None:
        print_parameters(zoo.several(mixers))
        return
    table = Table("recipe", "width", "layers", "heads", "tokens", "tokens a step")
    for name in recipes.names():
        recipe, _ = recipes.load(name)
        sizes = recipe.hidden_size, recipe.layers, recipe.heads, f"{recipe.tokens:g}", recipe.batch_tokens
        table.add_row(name, *map(str, sizes))
    terminal().print(table)


def print_parameters(mixers: tuple[str, ...]) -> None:
    """Prints the parameter counts, in millions, of every recipe with every mixer."""
    from ..training import recipes
    from ..training.model import count, meta_model

    parts = ("body", "competition", "tied", "untied")
    table = Table("recipe", "mixer", title="parameters, millions")
    for part in parts:
        table.add_column(part, justify="right")
    for name, mixer in product(recipes.names(), mixers):
        counted = count(meta_model(recipes.load(name, {"mixer": mixer})[0]))
        table.add_row(name, mixer, *(f"{counted[part] / 1e6:,.2f}" for part in parts))
    terminal().print(table)
