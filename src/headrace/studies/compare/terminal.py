"""Progress and results of a comparison on the terminal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import statistics, sweep, tuning
from .findings import findings, headline
from .page import HEADER, SHOWN, cells, matching
from .plan import Arm, Plan, Study
from .summary import labels, show, summarise

LINES = 20  # number of progress lines in all if the output is not a terminal
COLUMNS = ("{task.description}", BarColumn(), "{task.completed:.0f}/{task.total:.0f}", "{task.fields[score]}")


class Board:
    """Prints progress: a bar for all steps, a bar for each running arm and a line for each finished arm. If the output
    is not a terminal, LINES lines with the number of finished steps replace the bars."""

    def __init__(self, progress: Progress, study: Study):
        self.progress = progress
        plans = [*study.trials(), *study.plans]
        self.names = {plan.name: labels(plan.mixers) for plan in plans}
        self.total = progress.add_task(
            "all arms", total=sum(arms_of(plan) * plan.recipe.steps for plan in plans), score=""
        )
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


def arms_of(plan: Plan) -> int:
    return len(plan.mixers) * len(plan.seed_numbers)


@contextmanager
def board(study: Study, console: Console) -> Iterator[Board]:
    columns = [TextColumn(column) if isinstance(column, str) else column for column in COLUMNS]
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        yield Board(progress, study)


def print_results(results: dict[str, Any], console: Console) -> None:
    """Prints the headline, the matched quantities and, for each comparison, a table and the first findings."""
    comparisons, over, asked = summarise(results), sweep.read(results), statistics.of_results(results)
    say(
        console, asked[0].answer if asked else f"{sweep.answer(over)}." if over else headline(comparisons), style="bold"
    )
    for table in asked:
        print_table(console, table.about, table.header, table.rows)
    for comparison in comparisons:
        if matched := matching(comparison):
            say(console, matched)
    for comparison in (c for c in comparisons if c.plan["tuning"]):
        header, *rows = tuning.table(comparison, results)
        print_table(console, f"{comparison.plan['name']}, search", header, rows)
    if over:
        print_table(console, f"by {over.field}", ["mixer", *(f"{over.field}={v}" for v in over.values)], over.table())
        print_findings(console, sweep.findings(over, bool(asked)))
        return
    for comparison in comparisons:
        rows = [[c.label, *cells(c)] for c in comparison.shown]
        print_table(console, comparison.plan["name"], HEADER, rows)
        print_findings(console, findings(comparison, bool(asked)))


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(header):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_findings(console: Console, sentences: list[str]) -> None:
    for sentence in sentences[:SHOWN]:
        say(console, f"- {sentence}")
    if more := sentences[SHOWN:]:
        say(console, f"({len(more)} more in the report)")
    console.print()


def say(console: Console, sentence: str, **style: Any) -> None:
    console.print(sentence, highlight=False, soft_wrap=True, markup=False, **style)
