"""Writes the report of a comparison: PNG pictures, and report.html with the pictures as SVG."""

import json
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from ...report.numbers import count
from ...report.page import Name, Page, Picture, Section, picture, template
from . import statistics, sweep, tuning
from .conditions import conditions
from .example import ROLES, about, example, guessing
from .findings import findings, headline
from .plots import colours, draw
from .rows import rows, write
from .summary import Comparison, Contender, show, show_contender, summarise, task_of

SHOWN = 3  # number of findings shown; the rest are folded
HEADER = ("mixer", "held-out score", "per seed", "parameters", "state, bytes", "training tokens/s")
SIZES = ("mixer", "expression", "gate parameters", "MLP width", "FLOPs per row")
EQUAL = (
    "Every mixer trains on the same data in the same order; a mixer and its softmax version start from the same "
    "weights. In the folder of this page, results.json holds all scores of every seed over time, and runs.csv a row "
    "for each run."
)


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Draws the pictures, writes them and report.html into the folder, and returns the path of report.html."""
    comparisons, over, asked = summarise(results), sweep.read(results), statistics.of_results(results)
    write(rows(results), folder / "runs.csv")
    return Page(
        title=results["study"]["title"],
        about=[matched for matched in map(matching, comparisons) if matched],
        sections=[
            *map(planned_section, asked),
            *tuning_sections(results, comparisons),
            *([sweep_section(over, folder, bool(asked))] if over else []),
            *(section(c, folder, bool(asked)) for c in comparisons),
        ],
        command=results["command"],
        environments=results["environments"],
        answer=asked[0].answer if asked else f"{sweep.answer(over)}." if over else headline(comparisons),
    ).write(folder / "report.html")


def planned_section(table: statistics.Table) -> Section:
    title = "The statistic of the plan" if table.answer else "The means behind it"
    return Section(title=title, about=(table.about,), header=table.header, rows=table.rows)


def tuning_sections(results: dict[str, Any], comparisons: list[Comparison]) -> list[Section]:
    """The search in each comparison: the median held-out loss of every value, and which value was taken."""
    return [
        Section(title=f"{c.plan['name']}: search", about=(tuning.about(c.plan),), header=header, rows=found)
        for c in comparisons
        if c.plan["tuning"]
        for header, *found in [tuning.table(c, results)]
    ]


def section(comparison: Comparison, folder: Path, planned: bool) -> Section:
    plan, task = comparison.plan, task_of(comparison.plan["task"])
    return Section(
        title=plan["name"],
        about=(f"{about(task)} {guessing(task)}",),
        content=example_row(task),
        header=HEADER,
        rows=[[name(c, comparison), *cells(c)] for c in comparison.shown],
        sentences=findings(comparison, planned),
        shown=SHOWN,
        pictures=saved(draw(comparison), folder, plan["name"]),
        details=settings(comparison),
    )


def matching(comparison: Comparison) -> str:
    """The quantities that are matched and those that are not; empty for a single model."""
    said = conditions(comparison)
    return " ".join([f"{comparison.plan['name']}:", *said]) if said else ""


def settings(comparison: Comparison) -> Section:
    plan = comparison.plan
    recipe, shape = plan["recipe"], plan["shape"]
    steps = (
        f"{recipe['steps']} steps of {recipe['batch_size']} × {plan['length']} tokens, hidden size "
        f"{shape['hidden_size']}, {count(shape['heads'], 'head')}, {count(shape['layers'], 'layer')}, learning rate "
        f"{recipe['lr']}, {seeds_of(plan['seeds'])}."
    )
    return Section(
        title="Settings and sizes",
        about=(steps, EQUAL),
        header=SIZES,
        rows=[[name(c, comparison), *sizes(c)] for c in comparison.shown],
        listing=json.dumps({key: plan[key] for key in ("task", "shape", "recipe")}, indent=2),
    )


def seeds_of(seeds: int | list[int]) -> str:
    return count(seeds, "seed") if isinstance(seeds, int) else f"seeds {', '.join(map(str, seeds))}"


def sweep_section(over: sweep.Sweep, folder: Path, planned: bool) -> Section:
    first = over.comparisons[0]
    by_label = {contender.label: contender for comparison in over.comparisons for contender in comparison.contenders}
    return Section(
        title=f"By {over.field}",
        header=("mixer", *(f"{over.field}={value}" for value in over.values)),
        rows=[[name(by_label[label], first), *scores] for label, *scores in over.table()],
        sentences=sweep.findings(over, planned),
        shown=SHOWN,
        pictures=saved(sweep.draw(over), folder, f"by-{over.field}"),
    )


def example_row(task: Any) -> Markup:
    tokens = example(task)
    present = {role for token in tokens if not isinstance(token, int) for _, role in token.parts}
    roles = [role for role in ROLES if role in present]
    return Markup(template("example.html", "headrace.studies.compare").render(tokens=tokens, roles=roles))


def name(contender: Contender, comparison: Comparison) -> Name:
    return Name(contender.label, colours(comparison)[contender.mixer], contender.mixer)


def cells(c: Contender) -> list[str]:
    seeds = " · ".join(show(c.metric, score).removesuffix(c.metric.unit).strip() for score in c.by_seed.values())
    numbers = (f"{c.constant(field):,}" for field in ("parameters", "state_bytes"))
    return [show_contender(c) if c.by_seed else "diverged", seeds, *numbers, c.speed]


def sizes(c: Contender) -> list[str]:
    width, flops = c.constant("intermediate_size"), c.constant("flops")
    return [
        c.mixer,
        f"{c.constant('gate_parameters'):,}",
        "–" if width is None else f"{width:,}",
        "not counted" if flops is None else f"{flops:,}",
    ]


def saved(drawn: dict[str, tuple[str, Figure]], folder: Path, name: str) -> list[Picture]:
    return [picture(caption, figure, folder / f"{name}-{kind}.png") for kind, (caption, figure) in drawn.items()]
