"""Scores with standard errors over rows, and differences of two models on the same rows."""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..report import stats
from ..report.stats import Mean

# Fewest rows for a verdict on two models: with 10 or more, equal models are told apart in at most 6.5 % of cases, for
# rows that are right or wrong and for log-likelihoods of rows of unequal length (test_evaluate.py).
ROWS = 10
TOO_FEW = "too few rows to tell them apart"
ALIKE = "equal on every row"
NOT_FINITE = "not comparable, as a score is not finite,"
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


@dataclass(frozen=True)
class Pair:
    """The scores of two models on the same rows. `difference` is the second minus the first, in percentage points or in
    nats of log-likelihood per word, byte or row; above 0, the second is better."""

    first: Score
    second: Score

    @property
    def unit(self) -> str:
        return "nats" if self.first.likelihood else "points"

    @property
    def difference(self) -> Mean:
        factor = 1 if self.first.likelihood else 100
        rows = zip(self.first.rows, self.second.rows, strict=True)
        return stats.mean(*zip(*((factor * (b - a), weight) for (a, weight), (b, _) in rows), strict=True))

    @property
    def undecided(self) -> str | None:
        """Why the difference can have no verdict, or None."""
        difference = self.difference
        if not math.isfinite(difference.value):
            return NOT_FINITE
        if all(a == b for (a, _), (b, _) in zip(self.first.rows, self.second.rows, strict=True)):
            return ALIKE
        return TOO_FEW if difference.n < ROWS else None


def pair(first: dict[str, Any], second: dict[str, Any], metric: str) -> Pair | None:
    """The pair of two records of one item; None if the rows differ, as those of needle tasks do between tokenizers."""
    hashes = [[sample["doc_hash"] for sample in record["samples"]] for record in (first, second)]
    if hashes[0] != hashes[1]:
        return None
    return Pair(scores(first)[metric], scores(second)[metric])


def guessing(record: dict[str, Any]) -> float | None:
    """The accuracy of choosing an answer at random; None for tasks without choices."""
    choices = [sample["choices"] for sample in record["samples"]]
    return fmean(1 / count for count in choices) if min(choices) > 1 else None
