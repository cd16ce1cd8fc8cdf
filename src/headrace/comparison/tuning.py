"""The search for a value of the recipe, such as the learning rate, for each mixer apart, on seeds and rows that are not
reported.

Every value is a trial: a plan of its own whose arms are trained and stored like all others. A mixer takes the value
with the lowest median of the final loss over the seeds of the search, on the rows for tuning.
"""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from ..report.numbers import seeds_of
from ..report.page import Section
from ..tasks import Metric
from .plan import Plan
from .summary import Comparison, labels, show

Scores = list[dict[str, float]]  # at the end of each run of a mixer in a trial; {} of one that diverged


def best(plan: Plan, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mixer -> the value that it takes; the first value for a mixer that diverged with all of them.

    results: of the arms of all trials."""
    if plan.tuning is None:
        return {}
    names = [trial.name for trial in plan.trials()]
    losses = {mixer: [median_loss(scores_of(mixer, name, results)) for name in names] for mixer in plan.mixers}
    return {mixer: plan.tuning.values[own.index(min(own))] for mixer, own in losses.items()}


def scores_of(mixer: str, trial: str, results: Sequence[dict[str, Any]]) -> Scores:
    return [arm["scores"] for arm in results if (arm["mixer"], arm["comparison"]) == (mixer, trial)]


def median_loss(scores: Scores) -> float:
    """Infinite where at least half of the runs diverged."""
    return median(score.get("loss", math.inf) for score in scores)


def section(comparison: Comparison, results: dict[str, Any]) -> Section:
    """The search of a comparison: the loss and the score of each mixer at every value, and the value taken."""
    plan, rows = comparison.plan, []
    field, seeds = plan["tuning"]["field"], ", ".join(map(str, plan["tuning"]["seeds"]))
    chosen, values = results["tuned"][plan["name"]], [trial["value"] for trial in plan["trials"]]
    for mixer, label in labels(plan["mixers"]).items():
        own = [scores_of(mixer, trial["name"], results["trials"]) for trial in plan["trials"]]
        edge = ", at the edge" if at_edge(values, chosen[mixer]) else ""
        rows.append([label, *(cell(comparison.metric, scores) for scores in own), f"{chosen[mixer]}{edge}"])
    about = (
        f"Median of the final loss over seeds {seeds}, and the mean score; neither these seeds nor these rows are "
        "reported. Each mixer takes the value with the lowest loss."
    )
    header = ("mixer", *(f"{field} {value}" for value in values), "taken")
    return Section(f"{plan['name']}: search", (about,), header=header, rows=rows)


def cell(metric: Metric, scores: Scores) -> str:
    loss, known = median_loss(scores), [score[metric.name] for score in scores if score]
    if math.isinf(loss):
        return "diverged"
    lost = f", {seeds_of(len(known), len(scores) - len(known))}" if len(known) < len(scores) else ""
    return f"{loss:.3f} ({show(metric, fmean(known))}{lost})"


def at_edge(values: Sequence[Any], chosen: Any) -> bool:
    """Whether the best value is the least or the greatest number that was tried, so that a better one may lie
    beyond."""
    tried = [value for value in values if isinstance(value, int | float)]  # a clip may be none
    return bool(tried) and chosen in (min(tried), max(tried))
