"""How long a study will take on this machine: a few training steps of each task are timed, and multiplied."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from ..tasks import Task
from .arm import train
from .plan import Arm, Study

STEPS = 9  # that are timed of each task

Timed = Callable[[Arm, str], "Seconds"]


class Seconds(NamedTuple):
    """Seconds of a training step, and of all else that an arm takes: building, rows and evaluations."""

    step: float
    rest: float


def timed(arm: Arm, device: str) -> Seconds:
    """Trains an arm for STEPS steps, on one thread as workers do."""
    recipe = replace(arm.recipe, steps=STEPS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _, result = train(replace(arm, plan=replace(arm.plan, recipe=recipe)), lambda step, scores: None, device)
    finally:
        torch.set_num_threads(threads)
    step = recipe.batch_size * arm.task.length / median(result["speeds"])
    return Seconds(step, max(result["seconds"] - STEPS * step, 0.0))


def duration(study: Study, folder: Path, workers: Sequence[str], measure: Timed = timed) -> tuple[int, float]:
    """(number of arms that have no result in the folder, seconds that they will take with these workers)."""
    pending = [
        arm for plan in (*study.trials(), *study.plans) for arm in plan.arms() if not arm.result(folder).exists()
    ]
    if not pending:
        return 0, 0.0
    measure(pending[0], workers[0])  # imports, and what PyTorch prepares once
    by_task: dict[Task, Seconds] = {}
    for arm in pending:
        if arm.task not in by_task:
            by_task[arm.task] = measure(arm, workers[0])
    total = sum(arm.recipe.steps * by_task[arm.task].step + by_task[arm.task].rest for arm in pending)
    return len(pending), total / min(len(workers), len(pending))
