"""Progress and results of a comparison on the terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table

from ..report.page import Page, Section
from .page import report
from .plan import Arm, Study
from .summary import labels, show

LINES = 20  # number of progress lines in all if the output is not a terminal


class Board:
    """Prints progress: a bar for the steps of all arms with the latest score, and a line for each finished arm. If the
    output is not a terminal, LINES lines with the number of finished steps replace the bar."""

    def __init__(self, progress: Progress, study: Study):
        plans = [*study.trials(), *study.plans]
        self.names = {plan.name: labels(plan.mixers) for plan in plans}
        self.total = sum(len(plan.mixers) * len(plan.seed_numbers) * plan.recipe.steps for plan in plans)
        self.progress, self.bar = progress, progress.add_task("all arms", total=self.total)
        self.steps: dict[str, int] = {}

    def listen(self, arm: Arm, step: int, scores: dict[str, float] | None) -> None:
        before = sum(self.steps.values())
        self.steps[arm.slug] = step
        done = sum(self.steps.values())
        self.progress.update(self.bar, completed=done)
        console = self.progress.console
        if LINES * done // self.total > LINES * before // self.total and not console.is_terminal:
            console.print(f"{done} of {self.total} steps of all arms", highlight=False)
        if scores is None:
            return
        metric = arm.plan.task.metric
        score = show(metric, scores[metric.name]) if scores else "diverged"
        said = f"{arm.plan.name}: {self.names[arm.plan.name][arm.mixer]}, seed {arm.seed}: {score}"
        self.progress.update(self.bar, description=said)
        if step == arm.plan.recipe.steps or not scores:
            console.print(said, highlight=False)


@contextmanager
def board(study: Study, console: Console) -> Iterator[Board]:
    columns = ("{task.description}", BarColumn(), "{task.completed:.0f}/{task.total:.0f} steps", TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Board(progress, study)


def print_results(results: dict[str, Any], console: Console) -> None:
    """Prints the report without its pictures: the answer, the matched quantities, tables and the first findings."""
    print_sections(report(results, None), console)


def print_sections(page: Page, console: Console) -> None:
    """Prints a page without its pictures."""
    if page.answer:
        say(console, page.answer, style="bold")
    for section in (Section(about=page.about), *page.sections):
        for paragraph in filter(None, section.about):
            say(console, paragraph)
        if section.rows:
            console.print(table(section))
        for sentence in section.sentences[: section.shown]:
            say(console, f"- {sentence}")
        if more := section.sentences[section.shown :] if section.shown else ():
            say(console, f"({len(more)} more in the report)")


def table(section: Section) -> Table:
    drawn = Table(title=section.title, title_justify="left", title_style="bold")
    for i, column in enumerate(section.header):
        drawn.add_column(column, justify="right" if i else "left")
    for row in section.rows:
        drawn.add_row(*map(str, row))
    return drawn


def say(console: Console, sentence: str, **style: Any) -> None:
    console.print(sentence, highlight=False, soft_wrap=True, markup=False, **style)
