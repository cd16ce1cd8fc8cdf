"""Runs a study: trains every arm that is not finished yet, and collects the results."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...utils.integrity import write_result
from .folder import read_result, result_path
from .plan import Arm, Study
from .pool import Listen, train_all
from .tuning import best


def complete(study: Study, folder: Path, listen: Listen, workers: Sequence[str]) -> dict[str, Any]:
    """Runs a study in a folder claimed for it, writes results.json there and returns its content.

    Arms with a result in the folder are not trained again, so an interrupted study continues.

    Args:
        listen: called with (arm, step, scores) on progress, first for the arms that are finished already.
        workers: the device of each worker process.

    Raises:
        InputError: a worker process died, or a file in the place of an arm's result is none.
    """
    trials = finished([arm for trial in study.trials() for arm in trial.arms()], folder, listen, workers)
    tuned = {plan.name: best(plan, trials) for plan in study.plans}
    arms = finished(study.arms(tuned), folder, listen, workers)
    results = collect(study, arms, trials) | {"tuned": tuned}
    write_result(folder / "results.json", results)
    return results


def finished(arms: Sequence[Arm], folder: Path, listen: Listen, workers: Sequence[str]) -> list[dict[str, Any]]:
    """The results of arms; those without a result in the folder are trained."""
    pending = []
    for arm in arms:
        path = result_path(folder, arm)
        if path.exists():
            listen(arm, arm.plan.recipe.steps, read_result(path)["scores"])
        else:
            pending.append(arm)
    if pending:
        train_all(pending, folder, workers, listen)
    return [read_result(result_path(folder, arm)) for arm in arms]


def collect(study: Study, arms: list[dict[str, Any]], trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of results.json. An arm keeps the commit of its environment."""
    environments: list[dict[str, Any]] = []
    for arm in (*arms, *trials):
        environment = arm.pop("environment")
        arm["commit"] = environment.get("commit")
        if environment not in environments:
            environments.append(environment)
    command = shlex.join(["headrace", *sys.argv[1:]])
    return {
        "study": study.to_json(), "command": command, "environments": environments, "arms": arms, "trials": trials,
    }  # fmt: skip
