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

Result = dict[str, Any]


def best(plan: Plan, trials: Sequence[Result]) -> dict[str, Any]:
    """Mixer -> the value that it takes; the first value for a mixer that diverged with all of them."""
    if plan.tuning is None:
        return {}
    losses = medians(plan.to_json()["trials"], trials)
    return {mixer: min(by_value, key=by_value.__getitem__) for mixer, by_value in losses.items()}


def medians(trials: Sequence[dict[str, Any]], results: Sequence[Result]) -> dict[str, dict[Any, float]]:
    """Mixer -> value -> median loss; infinite where most runs diverged. trials: {name, value} of each."""
    by_mixer: dict[str, dict[Any, float]] = {}
    for trial in trials:
        losses: dict[str, list[float]] = {}
        for arm in results:
            if arm["comparison"] == trial["name"]:
                losses.setdefault(arm["mixer"], []).append(arm["scores"].get("loss", math.inf))
        for mixer, own in losses.items():
            by_mixer.setdefault(mixer, {})[trial["value"]] = median(own)
    return by_mixer


def section(comparison: Comparison, results: dict[str, Any]) -> Section:
    """The search of a comparison: the loss and the score of each mixer at every value, and the value taken."""
    plan = comparison.plan
    field, seeds = plan["tuning"]["field"], ", ".join(map(str, plan["tuning"]["seeds"]))
    chosen, values = results["tuned"][plan["name"]], [trial["value"] for trial in plan["trials"]]
    losses, rows = medians(plan["trials"], results["trials"]), []
    for mixer, label in labels(plan["mixers"]).items():
        own = [cell(comparison.metric, losses[mixer][t["value"]], t["name"], mixer, results) for t in plan["trials"]]
        edge = ", at the edge" if at_edge(values, chosen[mixer]) else ""
        rows.append([label, *own, f"{chosen[mixer]}{edge}"])
    about = (
        f"Median of the final loss over seeds {seeds}, and the mean score; neither these seeds nor these rows are "
        "reported. Each mixer takes the value with the lowest loss."
    )
    header = ("mixer", *(f"{field} {value}" for value in values), "taken")
    return Section(f"{plan['name']}: search", (about,), header=header, rows=rows)


def cell(metric: Metric, loss: float, trial: str, mixer: str, results: dict[str, Any]) -> str:
    own = [arm["scores"] for arm in results["trials"] if (arm["comparison"], arm["mixer"]) == (trial, mixer)]
    scores = [score[metric.name] for score in own if score]
    if math.isinf(loss):
        return "diverged"
    lost = f", {seeds_of(len(scores), len(own) - len(scores))}" if len(scores) < len(own) else ""
    return f"{loss:.3f} ({show(metric, fmean(scores))}{lost})"


def at_edge(values: Sequence[Any], chosen: Any) -> bool:
    """Whether the best value is the least or the greatest that was tried, so that a better one may lie beyond."""
    return chosen in (min(values), max(values))
