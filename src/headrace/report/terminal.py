"""Progress and results on the terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..train.plan import Arm, Study
from . import sweep
from .summary import Comparison, labels, show, show_contender, summarise
from .words import words

LINES = 20  # of progress, where there is no terminal to draw bars on
COLUMNS = ("{task.description}", BarColumn(), "{task.completed:.0f}/{task.total:.0f}", "{task.fields[score]}")


class Board:
    """One bar for all steps, one for each arm at work, one line for each arm that is done. Without a terminal there are
    no bars, and LINES lines say how many steps are done."""

    def __init__(self, progress: Progress, study: Study):
        self.progress = progress
        self.names = {plan.name: labels(plan.mixers) for plan in study.plans}
        self.total = progress.add_task("all arms", total=sum(arm.plan.recipe.steps for arm in study.arms()), score="")
        self.bars: dict[str, TaskID] = {}
        self.steps: dict[str, int] = {}
        self.lines = 0

    def listen(self, arm: Arm, step: int, scores: dict[str, float] | None) -> None:
        name = f"{arm.plan.name}: {self.names[arm.plan.name][arm.mixer]}, seed {arm.seed}"
        if arm.slug not in self.bars:
            self.bars[arm.slug] = self.progress.add_task(name, total=arm.plan.recipe.steps, score="")
        self.progress.advance(self.total, step - self.steps.get(arm.slug, 0))
        self.steps[arm.slug] = step
        self.progress.update(self.bars[arm.slug], completed=step)
        self._say_steps()
        if scores is None:
            return
        metric = arm.plan.task.metric
        score = show(metric, scores[metric.name]) if scores else "diverged"
        self.progress.update(self.bars[arm.slug], score=score)
        if step == arm.plan.recipe.steps or not scores:
            self.progress.console.print(f"{name}: {score}", highlight=False)
            self.progress.remove_task(self.bars[arm.slug])

    def _say_steps(self) -> None:
        done, total = sum(self.steps.values()), sum(task.total or 0 for task in self.progress.tasks[:1])
        lines = int(LINES * done / total)
        if lines > self.lines and not self.progress.console.is_terminal:
            self.lines = lines
            self.progress.console.print(f"{done} of {total:.0f} steps of all arms", highlight=False)


@contextmanager
def board(study: Study, console: Console) -> Iterator[Board]:
    columns = [TextColumn(column) if isinstance(column, str) else column for column in COLUMNS]
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        yield Board(progress, study)


def print_results(results: dict[str, Any], console: Console) -> None:
    if over := sweep.read(results):
        print_sweep(over, console)
        return
    for comparison in summarise(results):
        print_comparison(comparison, console)


def print_sweep(over: sweep.Sweep, console: Console) -> None:
    table = Table("mixer", title=f"by {over.field}", title_justify="left", title_style="bold")
    for value in over.values:
        table.add_column(f"{over.field}={value}", justify="right")
    for row in over.table():
        table.add_row(*row)
    console.print(table)
    for sentence in sweep.words(over):
        console.print(f"- {sentence}", highlight=False, soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A table of the contenders and what they showed, in words."""
    table = Table(title=comparison.plan["name"], title_justify="left", title_style="bold")
    table.add_column("mixer")
    for column in ("score", "parameters", "gates", "state bytes", "tokens/s"):
        table.add_column(column, justify="right")
    for c in comparison.shown:
        score = show_contender(c) if c.by_seed else "diverged"
        numbers = (c.constant("parameters"), c.constant("gate_parameters"), c.constant("state_bytes"), c.speed)
        table.add_row(c.label, score, *(f"{number:,.0f}" for number in numbers))
    console.print(table)
    for sentence in words(comparison):
        console.print(f"- {sentence}", highlight=False, soft_wrap=True)
    console.print()
