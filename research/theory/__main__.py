"""The command `python -m research.theory`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.files.processes import locked
from headrace.utils.errors import InputError

from . import EXPERIMENTS, Result, describe, run, save, select

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def theory(
    name: Annotated[
        str | None,
        typer.Argument(help=r"Experiment, or all. \[default: none, which lists the experiments]", show_default=False),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for NAME.png and NAME.json.")] = Path("runs/theory"),
    seed: Annotated[int, typer.Option(help="Random seed of the keys and values.", min=0, max=2**32)] = 0,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help=r"Folder of a trained model, with `state-probe`. \[default: newly initialized layers]"),
    ] = None,
) -> None:
    """Check theoretical properties of linear attention by experiment, and plot them.

    Prints each measured value beside its predicted bound. Exit code 1 if a prediction fails."""
    console, failed = Console(), 0
    if name is None and checkpoint is not None:
        raise InputError(f"--checkpoint {str(checkpoint)!r} without an experiment; expected it with state-probe")
    if name is None:
        table = Table("experiment", "what it shows")
        for known in EXPERIMENTS:
            table.add_row(known, describe(known))
        console.print(table)
        return
    for known in select(name, checkpoint):
        result = run(known, seed, checkpoint)
        with locked(output):
            picture = save(known, seed, result, output)
        console.print(tabulate(known, result))
        console.print(f"{result.summary}\nPicture: {picture}\n", soft_wrap=True, highlight=False)
        failed += sum(not check.holds for check in result.checks)
    raise typer.Exit(1 if failed else 0)


def tabulate(name: str, result: Result) -> Table:
    table = Table("property", "measured", "", "bound", "", title=name, title_justify="left")
    for check in result.checks:
        verdict = "holds" if check.holds else "[red]FAILS"
        table.add_row(check.claim, f"{check.measured:.3g}", check.relation, f"{check.bound:.3g}", verdict)
    return table


if __name__ == "__main__":
    try:
        app(prog_name="python -m research.theory")
    except InputError as error:
        print(f"research.theory: {error}", file=sys.stderr)
        sys.exit(2)
