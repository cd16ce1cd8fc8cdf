"""An evaluation as report.html and as a table in the terminal."""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lm_eval
from rich.console import Console
from rich.table import Table

from ..report.page import Page, Section
from ..train.environment import environment
from .run import Evaluation
from .words import against_the_first, table, words

HEAD = ("task", "metric", "rows")
PAIRED = "Points of accuracy, or nats of log-likelihood per word, byte or row; above 0 is better. 95 % intervals."


def write_report(evaluation: Evaluation, paths: dict[str, str], output: Path) -> Path:
    """The path of report.html; `paths` are the checkpoints' by their names."""
    plan = evaluation.plan
    about = (
        f"{plan.suite} by lm-evaluation-harness {lm_eval.__version__}"
        f"{f', the first {plan.limit} rows of each task' if plan.limit else ''}"
        f"{f', rows from {plan.data}' if plan.data else ''}. "
        "After ± stands the standard error over rows, of perplexities by the delta method."
    )
    rows = [[row["item"], row["metric"], f"{row['rows']:,}", *row["shown"]] for row in table(evaluation)]
    scored = Section("", "", words(evaluation), [*HEAD, *evaluation.items], rows)
    first = next(iter(evaluation.items))
    paired = [
        Section(f"{model} against {first}, row by row", PAIRED, (), list(rows[0]), [list(row.values()) for row in rows])
        for model, rows in against_the_first(evaluation).items()
    ]
    page = Page(
        "Evaluation",
        about,
        [scored, *paired, how(evaluation, paths)],
        shlex.join(["headrace", *sys.argv[1:]]),
        [environment() | {"lm_eval": lm_eval.__version__, "seed": plan.seed}],
    )
    return page.write(output / "report.html")


def how(evaluation: Evaluation, paths: dict[str, str]) -> Section:
    rows: list[list[Any]] = [
        [model, paths[model], item, f"{record['max_length']:,}", f"{record['seconds']:,.1f}"]
        for model, records in evaluation.items.items()
        for item, record in records.items()
    ]
    settings = ", ".join(f"{name} {value}" for name, value in asdict(evaluation.plan).items() if value is not None)
    return Section("How", settings, (), ["model", "checkpoint", "task", "tokens of context", "seconds"], rows)


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    shown = Table(*HEAD[:2])
    for column in (HEAD[2], *evaluation.items):
        shown.add_column(column, justify="right")
    for row in table(evaluation):
        shown.add_row(row["item"], row["metric"], f"{row['rows']:,}", *row["shown"])
    console.print(shown)
    for sentence in words(evaluation):
        console.print(f"- {sentence}", highlight=False, soft_wrap=True)
