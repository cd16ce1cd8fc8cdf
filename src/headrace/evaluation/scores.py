"""Scores with standard errors over rows, and differences of two models on the same rows."""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..report import stats
from ..report.differences import Difference, Unit
from ..report.stats import Mean

# Fewest rows for a verdict on two models: with 10 or more, equal models are told apart in at most 6.5 % of cases, for
# rows that are right or wrong and for log-likelihoods of rows of unequal length (test_evaluate.py).
ROWS = 10
FEW, EQUAL, OTHER, NOT_FINITE = "too few rows", "equal on every row", "other rows", "a score is not finite"
NATS = Unit("nats of log-likelihood per word or row", "nats", 4, noun="row")
POINTS = Unit("points of accuracy", "points", 1, scale=100, noun="row")
Rows = list[tuple[float, float]]  # (summand, weight) of each row


@dataclass(frozen=True)
class Score:
    """A metric over rows. Its mean, per unit of weight, is an accuracy or a log-likelihood per word, byte or row."""

    metric: str
    rows: Rows

    @property
    def mean(self) -> Mean:
        return stats.mean(*zip(*self.rows, strict=True))

    def above(self, chance: float) -> bool:
        """Whether the right rows are more than guesses that are right with the probability `chance`."""
        return stats.above(round(sum(value for value, _ in self.rows)), len(self.rows), chance)

    @property
    def likelihood(self) -> bool:
        """Whether the metric is a function of log-likelihoods, for which lower is better."""
        return self.metric.endswith("perplexity") or self.metric == "bits_per_byte"

    @property
    def value(self) -> float:
        """The metric: an accuracy, a perplexity or bits per byte."""
        if self.metric == "bits_per_byte":
            return -self.mean.value / math.log(2)
        return exponential(-self.mean.value) if self.likelihood else self.mean.value

    @property
    def stderr(self) -> float:
        """Standard error of `value`; for perplexities by the delta method."""
        if self.metric == "bits_per_byte":
            return self.mean.error / math.log(2)
        return self.value * self.mean.error if self.likelihood else self.mean.error


def scores(record: dict[str, Any]) -> dict[str, Score]:
    """Metric -> score of a recorded item. Metrics of other lengths of a needle task, which the harness sets to -1, are
    left out."""
    samples = record["samples"]
    values_by_name = {name: [sample["scores"][name] for sample in samples] for name in samples[0]["scores"]}
    return {
        name: Score(name, [tuple(value) if isinstance(value, list) else (value, 1.0) for value in values])
        for name, values in values_by_name.items()
        if values != [-1.0] * len(values)
    }


def exponential(x: float) -> float:
    """e^x, infinite where a float cannot hold it."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def difference(model: str, first: str, item: str, metric: str, records: dict[str, dict[str, Any]]) -> Difference:
    """The score of a model less that of the first on the same rows, so that the difficulty of a row cancels. Above 0,
    the model is better.

    records: of both on the item. A needle task's rows differ between tokenizers."""
    own, base = (records[name]["samples"] for name in (model, first))
    score, where = scores(records[model])[metric], f"{item} {shown_metric(item, metric)}"
    unit = NATS if score.likelihood else POINTS
    if [sample["doc_hash"] for sample in own] != [sample["doc_hash"] for sample in base]:
        return Difference(model, first, stats.mean([]), 1.0, unit, where, undecided=OTHER)
    rows = list(zip(score.rows, scores(records[first])[metric].rows, strict=True))
    mean = stats.mean(*zip(*((a - b, weight) for (a, weight), (b, _) in rows), strict=True))
    undecided = None
    if not math.isfinite(mean.value):
        undecided = NOT_FINITE
    elif all(a == b for (a, _), (b, _) in rows):
        undecided = EQUAL
    elif mean.n < ROWS:
        undecided = FEW
    return Difference(model, first, mean, mean.p, unit, where, undecided=undecided)


def shown_metric(item: str, metric: str) -> str:
    """The name of a metric in reports; for a needle task, whose metric the harness names by its length, "found"."""
    return "found" if metric == item.rpartition("@")[2] else metric


def guessing(record: dict[str, Any]) -> float | None:
    """The accuracy of choosing an answer at random; None for tasks without choices."""
    choices = [sample["choices"] for sample in record["samples"]]
    return fmean(1 / count for count in choices) if min(choices) > 1 else None
