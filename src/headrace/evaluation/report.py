"""An evaluation as report.html and as a table in the terminal."""

import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lm_eval
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ..files.environment import environment
from ..report.page import Page, Section, picture
from ..report.style import PALETTE, SOFT, STYLE
from .findings import PairedComparison, against_the_first, findings, table
from .run import Evaluation

HEAD = ("task", "metric", "rows")
PAIRED = ("task", "metric", "difference", "standard error", "95 % interval", "p", "p by Holm", "verdict")
UNITS = {"points": "points of accuracy", "nats": "nats of log-likelihood per word or row"}
ABOUT_PAIRS = (
    "Mean difference over the same rows, so that the difficulty of a row cancels, in points of accuracy or nats of "
    "log-likelihood per word, byte or row. Above 0, the model is better; p by Student's t, corrected by Holm's rule "
    "over all differences of this report."
)


def write_report(evaluation: Evaluation, paths: dict[str, str], output: Path) -> Path:
    """Writes report.html and its picture to the folder `output`; returns the path of report.html.

    paths: name -> path of each checkpoint."""
    plan = evaluation.plan
    about = (
        f"{plan.suite} by lm-evaluation-harness {lm_eval.__version__}"
        f"{f', the first {plan.limit} rows of each task' if plan.limit else ''}"
        f"{f', rows from {plan.data}' if plan.data else ''}. "
        "The number after ± is the standard error over rows, for perplexities by the delta method."
    )
    page = Page(
        "Evaluation",
        [about],
        [
            Section(sentences=findings(evaluation), header=[*HEAD, *evaluation.items], rows=table(evaluation)),
            *differences(evaluation, output),
            how(evaluation, paths),
        ],
        shlex.join(["headrace", *sys.argv[1:]]),
        [environment() | {"lm_eval": lm_eval.__version__, "seed": plan.seed}],
    )
    return page.write(output / "report.html")


def differences(evaluation: Evaluation, output: Path) -> list[Section]:
    """A section with a table for each model but the first; the first section has a picture of all differences."""
    first, differences = next(iter(evaluation.items)), against_the_first(evaluation)
    drawn = []
    if any(x.pair for comparisons in differences.values() for x in comparisons):
        caption = (
            f"Differences from {first} with 95 % intervals. An interval that contains 0 does not tell the two apart."
        )
        drawn = [picture(caption, forest(differences), output / "differences.png")]
    return [
        Section(
            f"{model} compared with {first}",
            about=(ABOUT_PAIRS,),
            header=PAIRED,
            rows=[comparison.cells() for comparison in comparisons],
            pictures=[] if i else drawn,
        )
        for i, (model, comparisons) in enumerate(differences.items())
    ]


def forest(differences: dict[str, list[PairedComparison]]) -> Figure:
    """A figure with a panel for each unit. All perplexities of a task have the same difference, so one is drawn."""
    paired = [x for comparisons in differences.values() for x in comparisons if x.pair]
    panels = {unit: dict.fromkeys(label(x) for x in paired if x.pair and x.pair.unit == unit) for unit in UNITS}
    panels = {unit: names for unit, names in panels.items() if names}
    heights = [len(names) * (0.5 + 0.5 * len(differences)) for names in panels.values()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, len(panels) + 0.36 * sum(heights)), layout="constrained")
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for ax, (unit, names) in zip(grid, panels.items(), strict=True):
            draw(ax, differences, list(names))
            ax.set_xlabel(f"{UNITS[unit]}: below 0 worse, above 0 better")
        if len(differences) > 1:
            grid[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def label(comparison: PairedComparison) -> str:
    one = comparison
    return one.item if one.pair and one.pair.first.likelihood else one.name


def draw(ax: Axes, by_model: dict[str, list[PairedComparison]], names: list[str]) -> None:
    ax.axvline(0, color=SOFT, lw=1)
    for i, (model, comparisons) in enumerate(by_model.items()):
        pairs = {label(x): x.pair for x in reversed(comparisons) if x.pair and label(x) in names}
        points = [(names.index(name), pair.difference) for name, pair in pairs.items()]
        shown = [
            (at + i / (len(by_model) + 1), x.value, x.reach) for at, x in points if math.isfinite(x.value + x.reach)
        ]
        if shown:
            y, mean, reach = zip(*shown, strict=True)
            ax.errorbar(mean, y, xerr=reach, fmt="o", ms=5, capsize=3, color=PALETTE[i % len(PALETTE)], label=model)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)


def how(evaluation: Evaluation, paths: dict[str, str]) -> Section:
    rows: list[list[Any]] = [
        [model, paths[model], item, f"{record['max_length']:,}", f"{record['seconds']:,.1f}"]
        for model, records in evaluation.items.items()
        for item, record in records.items()
    ]
    settings = ", ".join(f"{name} {value}" for name, value in asdict(evaluation.plan).items() if value is not None)
    header = ("model", "checkpoint", "task", "tokens of context", "seconds")
    return Section("Settings", about=(settings,), header=header, rows=rows)


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    shown = Table(*HEAD[:2])
    for column in (HEAD[2], *evaluation.items):
        shown.add_column(column, justify="right")
    for row in table(evaluation):
        shown.add_row(*row)
    console.print(shown)
    for model, comparisons in against_the_first(evaluation).items():
        paired = Table(*PAIRED, title=f"{model} compared with {next(iter(evaluation.items))}", title_justify="left")
        for comparison in comparisons:
            paired.add_row(*comparison.cells())
        console.print(paired)
    for sentence in findings(evaluation):
        console.print(f"- {sentence}", highlight=False, soft_wrap=True)
