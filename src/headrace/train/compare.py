"""The main job: train every arm of a study that is not trained yet, and write the report."""

import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import InputError
from ..report.html import write_report
from ..report.summary import summarise
from ..report.terminal import board, print_comparison
from .folder import claim, pending, read_json, result_path, write_json
from .plan import Study
from .pool import cores, train_all


def compare(study: Study, folder: Path, *, workers: int | None = None, console: Console | None = None) -> Path:
    """Run a study in its folder and return the path of the report.

    What the folder holds already is not done again: the call that was interrupted, repeated, goes on. InputError for a
    study that cannot be, a folder that holds another one, and a worker that dies.
    """
    console = console or Console()
    if workers is not None and workers < 1:
        raise InputError(f"--workers={workers}; expected at least 1")
    for plan in study.plans:
        plan.check()
        for warning in plan.warnings():
            console.print(f"note: {warning}", style="yellow", highlight=False)
    claim(folder, study)
    if arms := pending(folder, study):
        with board(study, arms, console) as progress:
            train_all(arms, folder, workers or cores(), progress.listen)
    results = collect(study, folder)
    write_json(folder / "results.json", results)
    for comparison in summarise(results):
        print_comparison(comparison, console)
    return write_report(results, folder)


def collect(study: Study, folder: Path) -> dict[str, Any]:
    """Everything that is finished, as one record."""
    planned = study.arms()
    arms = [read_json(path) for arm in planned if (path := result_path(folder, arm)).exists()]
    environments: list[dict[str, Any]] = []
    for environment in (arm.pop("environment") for arm in arms):
        if environment not in environments:
            environments.append(environment)
    return {
        "study": study.to_json(),
        "command": shlex.join(["headrace", *sys.argv[1:]]),
        "environments": environments,
        "planned": len(planned),
        "arms": arms,
    }
