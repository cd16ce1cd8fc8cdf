"""Runs a study in its folder: says how long it will take, trains every arm that is not finished yet, shows progress,
and collects the results.

arms/<arm>/result.json           the result of a finished arm
results.json, report.html, *.png the report
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from ..files import engine
from ..files.engine import Measure, Point, Row
from ..files.environment import command
from ..files.provenance import refuse_foreign
from ..files.results import write_result
from ..files.threads import Threads
from ..tasks import Task
from .arm import measure, train
from .plan import Arm, Study
from .summary import labels, show
from .tuning import best

STEPS = 9  # that are timed of each task
LINES = 20  # number of progress lines in all if the output is not a terminal
# The form of an arm's result.
RESULT = {
    "mixer": str, "seed": int, "scores": {}, "environment": {}, "flops": (int, float, None),
    "speeds": [(float, None)],
}  # fmt: skip
Listen = Callable[[Arm, int, dict[str, float] | None], None]  # (arm, step, scores after an evaluation, else None)


def check(folder: Path, study: Study) -> None:
    """InputError if the study is invalid, or if the folder holds files of something else. Writes nothing."""
    for plan in study.plans:
        plan.check()
    refuse_foreign(folder)


def complete(study: Study, folder: Path, listen: Listen, workers: Sequence[str]) -> dict[str, Any]:
    """Runs a study in a folder, writes results.json there and returns its content.

    Arms with a result in the folder are not trained again, so an interrupted study continues.

    Args:
        listen: called with (arm, step, scores) on progress, first for the arms that are finished already.
        workers: the device of each worker process.

    Raises:
        InputError: the folder has another study, a worker process died, or a file in the place of an arm's result is
            none.
    """
    with engine.claimed(folder, study.claim()):
        trials = trained([arm for trial in study.trials() for arm in trial.arms()], folder, listen, workers)
        tuned = {plan.name: best(plan, trials) for plan in study.plans}
        arms = trained(study.arms(tuned), folder, listen, workers)
        results = collect(study, arms, trials) | {"tuned": tuned}
        write_result(folder / "results.json", results)
    return results


def trained(
    arms: Sequence[Arm], folder: Path, listen: Listen, workers: Sequence[str], measure: Measure = measure
) -> list[Row]:
    """The results of arms in a folder that is claimed; those without a result in the folder are trained."""

    def forward(point: Point, news: Any) -> None:
        if isinstance(news, dict):
            listen(point.value, point.value.plan.recipe.steps, news["scores"])
        elif news is not None:
            listen(point.value, *news)

    points = [Point(arm.slug, arm.result, arm, RESULT) for arm in arms]
    return engine.run(folder, None, points, measure, forward, workers)


def collect(study: Study, arms: list[Row], trials: list[Row]) -> dict[str, Any]:
    """The content of results.json. An arm keeps the commit of its environment, and its place among all."""
    environments: list[dict[str, Any]] = []
    for arm in (*arms, *trials):
        environment = arm.pop("environment")
        arm["commit"] = environment.get("commit")
        if environment not in environments:
            environments.append(environment)
        arm["environment"] = environments.index(environment)
    made = {"study": study.to_json(), "command": command(), "environments": environments}
    return made | {"arms": arms, "trials": trials}


# --- the time that it will take --------------------------------------------------------------------------------------
def timed(arm: Arm, device: str) -> tuple[float, float]:
    """Seconds of a training step, and of all else that an arm takes: building, rows and evaluations. Trains an arm for
    STEPS steps, on one thread as workers do."""
    if device != "cpu":
        torch.accelerator.set_device_index(torch.device(device).index or 0)
    plan = replace(arm.plan, recipe=replace(arm.plan.recipe, steps=STEPS))
    with Threads(1):
        _, result = train(replace(arm, plan=plan), lambda step, scores: None, device)
    step = plan.recipe.batch_size * plan.task.length / median(result["speeds"])
    return step, max(result["seconds"] - STEPS * step, 0.0)


def duration(study: Study, folder: Path, workers: Sequence[str]) -> tuple[int, float]:
    """(number of arms that have no result in the folder, seconds that they will take with these workers)."""
    arms = (arm for plan in (*study.trials(), *study.plans) for arm in plan.arms())
    pending = [arm for arm in arms if not (folder / arm.result).exists()]
    if not pending:
        return 0, 0.0
    timed(pending[0], workers[0])  # imports, and what PyTorch prepares once
    by_task: dict[Task, tuple[float, float]] = {}
    for arm in pending:
        if arm.plan.task not in by_task:
            by_task[arm.plan.task] = timed(arm, workers[0])
    total = sum(arm.plan.recipe.steps * step + rest for arm in pending for step, rest in [by_task[arm.plan.task]])
    return len(pending), total / min(len(workers), len(pending))


# --- progress --------------------------------------------------------------------------------------------------------
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
