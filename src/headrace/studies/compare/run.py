"""The main job: train every arm of a study that is not trained yet, and collect what there is."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...utils.integrity import write_json
from .folder import read_result, result_path
from .plan import Study
from .pool import Listen, train_all


def complete(study: Study, folder: Path, listen: Listen, workers: Sequence[str]) -> dict[str, Any]:
    """Run a study in the folder it has claimed; return its results, which are also in the folder's results.json.

    What the folder holds already is not done again: the call that was interrupted, repeated, goes on. `listen` hears of
    progress, and first of the arms that are there; `workers` are the devices of as many processes. InputError where a
    worker dies.
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
    write_json(folder / "results.json", results)
    return results


def collect(study: Study, folder: Path) -> dict[str, Any]:
    """All finished arms as one record."""
    arms = [read_result(result_path(folder, arm)) for arm in study.arms()]
    environments: list[dict[str, Any]] = []
    for environment in (arm.pop("environment") for arm in arms):
        if environment not in environments:
            environments.append(environment)
    command = shlex.join(["headrace", *sys.argv[1:]])
    return {"study": study.to_json(), "command": command, "environments": environments, "arms": arms}
