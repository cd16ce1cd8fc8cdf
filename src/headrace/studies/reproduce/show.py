"""Shows reproduced numbers beside published ones, on the terminal and as a page."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...training.environment import environment
from ...training.history import duration
from ...training.machine import DAY
from ..report.numbers import seeds_of, significant
from ..report.page import Page, Section
from .experiment import Experiment, Scale, commands, load, names
from .numbers import Cell, Number
from .training import Fitted, on_machine, parameters, short, sizes

HEADER = ("model", "metric", "published", "reproduced, ± 95 %", "difference", "within interval")
FITTED = ("recipe", "mixer", "parameters", "seed", "tokens", "devices", "rows", "recompute", "GiB", "time")
COSTS = ("runs", "tokens", "rows in a pass", "recomputed", "GiB", "fits", "days")


def print_list(console: Console) -> None:
    table = Table("name", "what it is", "source")
    for experiment in map(load, names()):
        table.add_row(experiment.name, experiment.title, experiment.source)
    console.print(table)


def print_costs(machine: str, console: Console) -> None:
    """A row for each experiment at paper scale: what its training runs need of a machine."""
    table = Table("experiment", *COSTS, title=f"Training at paper scale on {machine}")
    for name in names():
        if row := costs(name, machine):
            table.add_row(name, *row)
    console.print(table)


def costs(name: str, machine: str) -> tuple[str, ...]:
    """The cells of COSTS for an experiment at paper scale; none for an experiment that trains nothing."""
    scale = load(name).at("paper")
    _, fits = on_machine(commands(scale, Path("root")), scale.machine, machine)
    if not fits:
        return ()
    rows = list(dict.fromkeys(str(number) for number in sorted(one.plan["rows_per_pass"] for one in fits)))
    fitting = sum(one.plan["fits"] for one in fits)
    return (
        str(len(fits)),
        short(round(sum(one.training.recipe.tokens for one in fits))),
        rows[0] if len(rows) == 1 else f"{rows[0]} to {rows[-1]}",
        str(sum(one.training.recipe.recompute for one in fits)),
        f"{max(one.gibibytes for one in fits):.0f}",
        "yes" if fitting == len(fits) else f"{fitting} of {len(fits)}",
        f"{sum(one.plan['days'] for one in fits):.2g}",
    )


def print_fits(fits: list[Fitted], console: Console) -> None:
    """A row for each training run: rows per pass, memory and days on its devices."""
    machine = f"{fits[0].plan['device']}, of {fits[0].plan['bytes_of_device'] / 2**30:.1f} GiB"
    table = Table(*FITTED, title=machine)
    for one in fits:
        table.add_row(*fit_row(one))
    console.print(table)
    runs = "1 training run" if len(fits) == 1 else f"{len(fits)} training runs, one after another"
    whole = duration(DAY * sum(one.plan["days"] for one in fits))
    console.print(
        f"{runs}: about {whole}, if each mixer reaches the part of the peak that was measured with it on one H200, or "
        "the median of the measured ones. Evaluations are not counted.",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def fit_row(one: Fitted) -> tuple[str, ...]:
    recipe, plan = one.training.recipe, one.plan
    memory = f"{one.gibibytes:.1f}" + ("" if plan["fits"] else ", does not fit")
    model = one.training.name, recipe.mixer, f"{parameters(recipe) / 1e6:.1f}M", str(recipe.seed)
    layout = str(plan["devices"]), str(plan["rows_per_pass"]), "yes" if recipe.recompute else "no"
    return *model, short(round(recipe.tokens)), *layout, memory, duration(DAY * plan["days"])


def print_cells(experiment: Experiment, cells: list[Cell], about: list[str], console: Console) -> None:
    """about: the sentences of `notes`."""
    if rows := shown(cells):
        table = Table(*HEADER, title=f"{experiment.title} ({experiment.source})", title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print(verdict(cells), soft_wrap=True, highlight=False)
    for sentence in about:
        console.print(f"- {sentence}", soft_wrap=True, highlight=False, markup=False)


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


def notes(experiment: Experiment, scale: str, plan: Scale, steps: list[list[str]]) -> list[str]:
    """Sentences on the scale as it is run, on where the published numbers stand, and on the paper.

    plan: the scale after --text, --only and --add; steps: its commands."""
    counts, tokens = sizes(steps) if any("{" in sentence for sentence in plan.note.values()) else ("", "")
    own = [sentence.format(parameters=counts, tokens=tokens) for sentence in plan.note.values()]
    read: dict[str, list[str]] = {}
    for row, place in experiment.places().items():
        read.setdefault(place, []).append(row)
    published = [f"Published, {'; '.join(rows)}: {place}." for place, rows in read.items()]
    changed = [f"Settings of {experiment.name} were changed: {'; '.join(plan.changes)}."] if plan.changes else []
    return [*(f"Scale {scale}: {sentence}." for sentence in own), *changed, *published, *experiment.notes]


def write_page(
    experiment: Experiment, scale: str, cells: list[Cell], about: list[str], path: Path, command: str
) -> Path:
    """about: the sentences of `notes`."""
    sentences = [*([verdict(cells)] if cells else []), *about]
    section = Section(sentences=sentences, header=HEADER, rows=shown(cells))
    intro = [f"{experiment.source}; scale: {scale}."]
    return Page(experiment.title, intro, [section], command, [environment()]).write(path)
