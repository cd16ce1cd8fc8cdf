"""Reproduce a table or figure of a paper: the commands as a shell script, and our numbers beside the published ones.

python -m research.reproduce                                    lists the tables and figures
python -m research.reproduce script figure-1 | sh               runs one; the same line continues
python -m research.reproduce show figure-1                      its numbers beside the published ones
python -m research.reproduce keep figure-1 --commit COMMIT      the numbers of every run into research/results
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import record
from headrace.report.numbers import seeds_of, significant
from headrace.utils.errors import InputError

from .. import RESULTS
from .experiment import Experiment, Scale, combinations, commands, load, names, run_folder, script, tailored
from .numbers import Cell, Number, cells, each, logged

HEADER = ("model", "metric", "published", "reproduced, ± 95 %", "difference", "within interval")
ScaleOption = Annotated[str, typer.Option("--scale", help="Scale of the experiment: paper (GPUs) or laptop.")]
Root = Annotated[Path | None, typer.Option(help=r"Folder of the results. \[default: runs/reproduce/<scale>]")]
Only = Annotated[list[str] | None, typer.Option(help="Axis and its values: AXIS=VALUE,VALUE,... Repeatable.")]
Text = Annotated[list[str] | None, typer.Option(help="Text file to train on. Repeatable.")]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.callback(invoke_without_command=True)
def listed(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        table = Table("name", "what it is", "source")
        for experiment in map(load, names()):
            table.add_row(experiment.name, experiment.title, experiment.source)
        Console().print(table)


@app.command("script")
def print_script(
    name: str, scale: ScaleOption = "laptop", root: Root = None, text: Text = None, only: Only = None
) -> None:
    """Print the commands as a shell script."""
    plan = tailored(load(name).at(scale), text or [], only or [])
    print(*script(commands(plan, folder(root, scale))), sep="\n")


@app.command()
def show(name: str, scale: ScaleOption = "laptop", root: Root = None, text: Text = None, only: Only = None) -> None:
    """Print the numbers that are there beside the published ones. --text and --only: those of the script."""
    chosen, console = load(name), Console()
    plan = tailored(chosen.at(scale), text or [], only or [])
    found = cells(chosen, plan, folder(root, scale))
    if rows := shown(found):
        table = Table(*HEADER, title=f"{chosen.title} ({chosen.source})", title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print(verdict(found), soft_wrap=True, highlight=False)
    for sentence in notes(chosen, scale, plan):
        console.print(f"- {sentence}", soft_wrap=True, highlight=False, markup=False)


@app.command()
def keep(
    name: str,
    commit: Annotated[str, typer.Option(help="The commit that made the runs.")],
    scale: ScaleOption = "laptop",
    root: Root = None,
) -> None:
    """Add the numbers of every run, before means and differences are taken, to research/results/reproduce/NAME.csv."""
    about = record.environment() | {"commit": commit}
    record.append(RESULTS / "reproduce" / f"{name}.csv", about, by_run(name, scale, folder(root, scale)))


def folder(root: Path | None, scale: str) -> Path:
    return root or Path("runs", "reproduce", scale)


def by_run(name: str, scale: str, root: Path) -> list[record.Row]:
    """The numbers of the models that are there; a metric that a run has no number of has no row.

    seconds: of training, by the clock."""
    chosen, kept = load(name), []
    at_scale = chosen.at(scale)
    trained = {step[-1]: step for step in commands(at_scale, root) if "train" in step}
    if not trained:
        raise InputError(f"NAME={name!r} trains no model at --scale={scale!r}; expected an experiment that does")
    for at in combinations(at_scale.axes):
        run = run_folder(at_scale, root, at)
        seconds = logged(at_scale, {"history": "train_runtime"}, at, root)
        about = {"seconds": seconds and seconds.value, "command": shlex.join(trained[str(run)])}
        for metric, place in chosen.columns.items():
            (number,) = each(at_scale, place, at, root)
            if number is not None:
                kept.append({"run": run.name, "metric": metric, "value": number.value} | about)
    return kept


def shown(cells: list[Cell]) -> list[tuple[str, ...]]:
    """A row for each number that is published or reproduced."""
    return [line(cell) for cell in cells if cell.published is not None or cell.ours is not None]


def line(cell: Cell) -> tuple[str, ...]:
    ours, within = "–", "–" if cell.within is None else "yes" if cell.within else "no"
    if cell.ours is not None:
        ours = number(cell.ours)
    published = "–" if cell.published is None else f"{cell.published:g}"
    difference = "–" if cell.difference is None else f"{cell.difference:+.3g}"
    return cell.row, cell.column, published, ours, difference, within


def number(one: Number) -> str:
    """The number with its interval and, if runs diverged, how many did not."""
    if not one.runs:
        return "diverged"
    reach = "" if one.reach is None else f" ± {significant(one.reach, 2)}"
    return f"{significant(one.value)}{reach}" + (f" ({seeds_of(one.runs, one.lost)})" if one.lost else "")


def verdict(cells: list[Cell]) -> str:
    """A sentence on how many published numbers are reproduced, and how many lie within the 95 % interval of ours."""
    published = sum(cell.published is not None for cell in cells)
    there = sum(cell.ours is not None and cell.ours.runs > 0 for cell in cells)
    both = sum(cell.difference is not None for cell in cells)
    judged = [cell.within for cell in cells if cell.within is not None]
    if not published:
        return f"Published numbers: none as text; reproduced numbers: {there}."
    if cells and not cells[0].comparable:
        return f"Published numbers: {published}; reproduced numbers: {there}, of other models, so no two are compared."
    if not both:
        return f"Published numbers: {published}; reproduced numbers: {there}, none for the same model and metric."
    said = f"Published numbers: {published}, of which {both} are reproduced"
    if not judged:
        return f"{said}; no reproduced number has a 95 % interval to judge the difference by."
    return f"{said}; within the 95 % interval of the reproduced number: {sum(judged)} of {len(judged)}."


def notes(experiment: Experiment, scale: str, plan: Scale) -> list[str]:
    """Sentences on the scale, on where the published numbers stand, and on the paper."""
    read: dict[str, list[str]] = {}
    for row, place in experiment.places().items():
        read.setdefault(place, []).append(row)
    published = [f"Published, {'; '.join(rows)}: {place}." for place, rows in read.items()]
    return [*(f"Scale {scale}: {sentence}." for sentence in plan.note.values()), *published, *experiment.notes]


if __name__ == "__main__":
    try:
        app(prog_name="python -m research.reproduce")
    except InputError as error:
        print(f"research.reproduce: {error}", file=sys.stderr)
        sys.exit(2)
