"""Runs a study: trains every arm that is not finished yet, and collects the results."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...utils.integrity import write_result
from .folder import read_result, result_path
from .plan import Study
from .pool import Listen, train_all


def complete(study: Study, folder: Path, listen: Listen, workers: Sequence[str]) -> dict[str, Any]:
    """Runs a study in a folder claimed for it, writes results.json there and returns its content.

    Arms with a result in the folder are not trained again, so an interrupted study continues.

    Args:
        listen: called with (arm, step, scores) on progress, first for the arms that are finished already.
        workers: the device of each worker process.

    Raises:
        InputError: a worker process died, or a file in the place of an arm's result is none.
    """
    pending = []
    for arm in study.arms():
        path = result_path(folder, arm)
        if path.exists():
            listen(arm, arm.plan.recipe.steps, read_result(path)["scores"])
        else:
            pending.append(arm)
    if pending:
        train_all(pending, folder, workers, listen)
    results = collect(study, folder)
    write_result(folder / "results.json", results)
    return results


def collect(study: Study, folder: Path) -> dict[str, Any]:
    """The results of all arms, which must be finished, as the content of results.json."""
    arms = [read_result(result_path(folder, arm)) for arm in study.arms()]
    environments: list[dict[str, Any]] = []
    for environment in (arm.pop("environment") for arm in arms):
        if environment not in environments:
            environments.append(environment)
    command = shlex.join(["headrace", *sys.argv[1:]])
    return {"study": study.to_json(), "command": command, "environments": environments, "arms": arms}
