"""The main job: train every arm of a study that is not trained yet, and collect what there is."""

import shlex
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError
from .folder import claim, read_json, result_path, write_json
from .plan import Study
from .pool import Listen, cores, train_all


def compare(study: Study, folder: Path, listen: Listen, *, workers: int | None = None) -> dict[str, Any]:
    """Run a study in its folder and return its results, which are also in the folder's results.json.

    What the folder holds already is not done again: the call that was interrupted, repeated, goes on. `listen` hears of
    progress, and first of the arms that are there. workers: one per core without it. InputError for a study that cannot
    be, a folder that holds another one, and a worker that dies.
    """
    if workers is not None and workers < 1:
        raise InputError(f"--workers={workers}; expected at least 1")
    for plan in study.plans:
        plan.check()
    claim(folder, study)
    pending = []
    for arm in study.arms():
        path = result_path(folder, arm)
        if path.exists():
            listen(arm, arm.plan.recipe.steps, read_json(path)["scores"])
        else:
            pending.append(arm)
    if pending:
        train_all(pending, folder, workers or cores(), listen)
    results = collect(study, folder)
    write_json(folder / "results.json", results)
    return results


def collect(study: Study, folder: Path) -> dict[str, Any]:
    """All finished arms as one record."""
    arms = [read_json(result_path(folder, arm)) for arm in study.arms()]
    environments: list[dict[str, Any]] = []
    for environment in (arm.pop("environment") for arm in arms):
        if environment not in environments:
            environments.append(environment)
    command = shlex.join(["headrace", *sys.argv[1:]])
    return {"study": study.to_json(), "command": command, "environments": environments, "arms": arms}
