"""Runs a study in its folder: trains every arm that is not finished yet, and collects the results.

plan.json                        the study as data; the folder is for this study only
arms/<arm>/result.json           the result of a finished arm
results.json, report.html, *.png the report
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...utils import integrity
from ...utils.errors import InputError
from ...utils.provenance import refuse_foreign
from .plan import Arm, Study
from .pool import Listen, train_all
from .tuning import best

NEEDED = {"mixer", "seed", "scores", "environment", "flops", "speeds"}  # required keys of an arm's result


def check(folder: Path, study: Study) -> None:
    """InputError if the study is invalid, or if the folder holds files of something else. Writes nothing."""
    for plan in study.plans:
        plan.check()
    refuse_foreign(folder)


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
    integrity.write_result(folder / "results.json", results)
    return results


def finished(arms: Sequence[Arm], folder: Path, listen: Listen, workers: Sequence[str]) -> list[dict[str, Any]]:
    """The results of arms; those without a result in the folder are trained."""
    pending = []
    for arm in arms:
        if (path := arm.result(folder)).exists():
            listen(arm, arm.plan.recipe.steps, read_result(path)["scores"])
        else:
            pending.append(arm)
    if pending:
        train_all(pending, folder, workers, listen)
    return [read_result(arm.result(folder)) for arm in arms]


def read_result(path: Path) -> dict[str, Any]:
    """The result of an arm. InputError if the file is not a result."""
    result = integrity.read_result(path)
    if not result.keys() >= NEEDED:
        raise InputError(f"{str(path)!r} is not the result of an arm; delete it and run the command again")
    return result


def collect(study: Study, arms: list[dict[str, Any]], trials: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of results.json. An arm keeps the commit of its environment."""
    environments: list[dict[str, Any]] = []
    for arm in (*arms, *trials):
        environment = arm.pop("environment")
        arm["commit"] = environment.get("commit")
        if environment not in environments:
            environments.append(environment)
    command = shlex.join(["headrace", *sys.argv[1:]])
    made = {"study": study.to_json(), "command": command, "environments": environments}
    return made | {"arms": arms, "trials": trials}
