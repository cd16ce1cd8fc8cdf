"""Runs a study in its folder: trains every arm that is not finished yet, and collects the results.

arms/<arm>/result.json           the result of a finished arm
results.json, report.html, *.png the report
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import engine
from ..files.engine import Measure, Point, Row
from ..files.environment import command
from ..files.provenance import refuse_foreign
from ..files.results import write_result
from .arm import measure
from .plan import Arm, Study
from .tuning import best

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
            listen(point.value, point.value.recipe.steps, news["scores"])
        elif news is not None:
            listen(point.value, *news)

    points = [Point(arm.slug, arm.result, arm, RESULT) for arm in arms]
    return engine.run(folder, None, points, measure, forward, workers)


def collect(study: Study, arms: list[Row], trials: list[Row]) -> dict[str, Any]:
    """The content of results.json. An arm keeps the commit of its environment."""
    environments: list[dict[str, Any]] = []
    for arm in (*arms, *trials):
        environment = arm.pop("environment")
        arm["commit"] = environment.get("commit")
        if environment not in environments:
            environments.append(environment)
    made = {"study": study.to_json(), "command": command(), "environments": environments}
    return made | {"arms": arms, "trials": trials}
