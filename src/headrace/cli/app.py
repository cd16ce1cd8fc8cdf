"""The command line. What a user gets wrong is one sentence on stderr and exit code 2; Ctrl-C is exit code 130."""

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .. import __version__, zoo
from ..spec.linear import to_json
from ..studies import catalog
from ..utils.errors import InputError
from . import studies as cli_eval
from . import training as cli_train
from .console import AcceptOld, interruptible, needing, telling, terminal, track

# What a disk, or whoever owns a folder, refuses.
UNWRITABLE = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "ENOTDIR")}

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    try:
        app()
    except InputError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        print(f"headrace: {error.filename or 'what was to be written'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Linear-time sequence models whose heads compete for what is written and what is read."""
    if version:
        print(f"headrace {__version__}")
        print_backends()
        raise typer.Exit


def compare(
    files: Annotated[list[str] | None, typer.Argument(help="More text files.", show_default=False)] = None,
    mixers: Annotated[
        str | None, typer.Option(help="Names or expressions, with commas between (see `zoo`), or all.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A name, with fields if need be: key-value(pairs=16).")] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text file for language modelling.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A `tokenizers` JSON file; bytes without one.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many.")] = None,
    steps: Annotated[int | None, typer.Option()] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    sweep: Annotated[str | None, typer.Option(help="FIELD=VALUE,VALUE,… of the task, shape or recipe.")] = None,
    hidden_size: Annotated[int | None, typer.Option()] = None,
    layers: Annotated[int | None, typer.Option()] = None,
    heads: Annotated[int | None, typer.Option()] = None,
    output: Annotated[Path | None, typer.Option(help="The report's folder; runs/<task> without one.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda (all GPUs), cuda:1, …. [default: auto]")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of processes. [default: one for each GPU, or for each core of a CPU]")
    ] = None,
    accept_old: AcceptOld = False,
) -> None:
    """Train mixers on one task, at equal numbers of parameters, and write a report. Without arguments: a demonstration.

    The same command continues what was interrupted.
    """
    from ..studies.compare.choose import choose
    from ..studies.compare.folder import check, claim
    from ..studies.compare.page import write_report
    from ..studies.compare.pool import place_workers
    from ..studies.compare.run import complete
    from ..studies.compare.terminal import board, print_results
    from ..utils.device import all_devices
    from ..utils.processes import locked

    changes = {
        "mixers": mixers, "seeds": seeds, "steps": steps, "batch_size": batch_size, "lr": lr, "length": length,
        "hidden_size": hidden_size, "layers": layers, "heads": heads,
    }  # fmt: skip
    study = choose(task, [*(text or []), *(files or [])], tokenizer, changes, sweep)
    folder, console = output or Path("runs", study.name), terminal()
    for plan in study.plans:
        for sentence in plan.idle_gates():
            console.print(f"Note: {sentence}", style="yellow", highlight=False, soft_wrap=True)
    places = place_workers(all_devices(device), workers)
    check(folder, study)
    with interruptible(f"what is finished is in {folder}; the same command continues"), locked(folder):
        claim(folder, study, accept_old)
        with board(study, console) as progress:
            results = complete(study, folder, progress.listen, places)
        report = write_report(results, folder)
    print_results(results, console)
    console.print(f"The report is {report}", soft_wrap=True, highlight=False)


@app.command(name="zoo")
def list_zoo(
    show: Annotated[str, typer.Option(help="update, axes, cost or paper.")] = "update",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Everything, as in docs/zoo.md.")] = False,
) -> None:
    """List the named mixers, each as an update of a memory, by four axes or by its cost; and whole models."""
    if show not in catalog.VIEWS:
        raise InputError(f"--show={show!r}; expected one of {', '.join(catalog.VIEWS)}")
    if as_markdown:
        print(catalog.markdown())
        return
    rows = {name: catalog.account(name) for name in zoo.names()}
    if as_json:
        whole = {name: {"spec": to_json(spec)} for name, spec in zoo.MODELS.items()}
        print(json.dumps(rows | whole, indent=1, ensure_ascii=False))
        return
    columns = catalog.VIEWS[show]
    table = Table(
        caption=f"Views: --show {', '.join(catalog.VIEWS)}. {catalog.COUNTED}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("mixer", no_wrap=True)
    for column in columns:
        number = column in ("bytes", "training", "decoding")
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for name, row in rows.items():
        table.add_row(name, *(catalog.cell(row[column]) for column in columns))
    terminal().print(table)
    terminal().print(f"Whole models: {', '.join(zoo.MODELS)}")


@app.command()
def verify(
    mixers: Annotated[str | None, typer.Option(help="With commas between; all of them without it.")] = None,
    device: Annotated[str | None, typer.Option(help="The accelerator without it, where there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
) -> None:
    """Check every way of running a mixer on this machine against the literal equation."""
    from ..studies.verify import TOLERANCE
    from ..studies.verify import verify as check
    from ..utils.device import on_device

    dtypes = {str(known).removeprefix("torch."): known for known in TOLERANCE}
    if dtype not in dtypes:
        raise InputError(f"--dtype={dtype!r}; expected one of {', '.join(dtypes)}")
    device = on_device(device, float64=dtype == "float64")
    names = zoo.split(mixers) if mixers else zoo.names()
    for name in names:
        zoo.mixer(name)  # a name that is unknown is so before the first check
    console, broken = terminal(), 0
    table = Table("mixer", "law", "relative error", "tolerance", "")
    with interruptible("nothing was kept"), telling(console) as tell:
        checked = track(names, "mixer", tell)
        for row in (row for name in checked for row in check([name], device, dtypes[dtype])):
            broken += not row.holds
            mark = "holds" if row.holds else "[red]BROKEN"
            table.add_row(row.mixer, row.law, f"{row.error:.1e}", f"{row.tolerance:.0e}", mark)
    console.print(table)
    console.print(f"{broken} of {table.row_count} laws are broken on {device} in {dtype}")
    raise typer.Exit(1 if broken else 0)


@app.command()
def backends() -> None:
    """List what the recurrence can run on here, and why the rest cannot."""
    print_backends()


def print_backends() -> None:
    from ..ops.dispatch import BACKENDS

    for name, backend in BACKENDS.items():
        reason = backend.missing()
        print(f"{name}: {f'not here: {reason}' if reason else f'available ({backend.about()})'}")


# name: the extra that it needs, and the command
EXTRAS: dict[str, tuple[str, Callable]] = {
    "compare": ("models", compare),
    "prepare": ("train", cli_train.prepare),
    "train": ("train", cli_train.train),
    "curves": ("train", cli_train.curves),
    "generate": ("models", cli_train.generate),
    "serve": ("serve", cli_train.serve),
    "convert": ("models", cli_train.convert),
    "retrofit": ("models", cli_train.retrofit),
    "recipes": ("train", cli_train.list_recipes),
    "lab": ("models", cli_eval.lab),
    "bench": ("models", cli_eval.bench),
    "inspect": ("models", cli_eval.inspect),
    "eval": ("eval", cli_eval.evaluate),
    "reproduce": ("train", cli_eval.reproduce),
}
for name, (extra, command) in EXTRAS.items():
    app.command(name=name)(needing(extra, name, command))
