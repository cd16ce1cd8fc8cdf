"""Scores with standard errors over rows, and differences of two models on the same rows."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from scipy import stats

from ..report.numbers import LEVEL, student

# Fewest rows for a verdict on two models: with 10 or more, equal models are told apart in at most 6.5 % of cases, for
# rows that are right or wrong and for log-likelihoods of rows of unequal length (test_evaluate.py).
ROWS = 10
TOO_FEW = "too few rows to tell them apart"
ALIKE = "equal on every row"
NOT_FINITE = "not comparable, as a score is not finite,"
Rows = list[tuple[float, float]]  # (summand, weight) of each row


@dataclass(frozen=True)
class Score:
    """A metric over rows. `mean`, per unit of weight, is an accuracy or a log-likelihood per word, byte or row."""

    metric: str
    rows: Rows

    @property
    def mean(self) -> float:
        return sum(value for value, _ in self.rows) / sum(weight for _, weight in self.rows)

    @property
    def error(self) -> float:
        """Standard error of `mean`, a ratio of sums if rows differ in weight, by the jackknife. Infinite if one row has
        all the weight."""
        n, mean, total = len(self.rows), self.mean, sum(weight for _, weight in self.rows)
        if max(weight for _, weight in self.rows) == total:
            return math.inf
        squares = sum(((value - mean * weight) / (total - weight)) ** 2 for value, weight in self.rows)
        return math.sqrt(squares * (n - 1) / n)

    @property
    def degrees(self) -> float:
        """Degrees of freedom of `error`: one less than the number of equally heavy rows that would tell as much."""
        weights = [weight for _, weight in self.rows]
        return sum(weights) ** 2 / sum(weight * weight for weight in weights) - 1

    @property
    def reach(self) -> float:
        """Half the 95 % confidence interval of `mean`, by Student's t."""
        return student(self.degrees) * self.error if math.isfinite(self.error) else math.inf

    def above(self, chance: float) -> bool:
        """Whether as many right rows have a probability of at most 2.5 % by guesses that are right with the probability
        `chance` (binomial test)."""
        right = round(sum(value for value, _ in self.rows))
        return bool(stats.binomtest(right, len(self.rows), chance, "greater").pvalue <= (1 - LEVEL) / 2)

    @property
    def likelihood(self) -> bool:
        """Whether the metric is a function of log-likelihoods, for which lower is better."""
        return self.metric.endswith("perplexity") or self.metric == "bits_per_byte"

    @property
    def value(self) -> float:
        """The metric: an accuracy, a perplexity or bits per byte."""
        if self.metric == "bits_per_byte":
            return -self.mean / math.log(2)
        return exponential(-self.mean) if self.likelihood else self.mean

    @property
    def stderr(self) -> float:
        """Standard error of `value`; for perplexities by the delta method."""
        if self.metric == "bits_per_byte":
            return self.error / math.log(2)
        return self.value * self.error if self.likelihood else self.error


def scores(record: dict[str, Any]) -> dict[str, Score]:
    """Metric -> score of a recorded item. Metrics of other lengths of a needle task, which the harness sets to -1, are
    left out."""
    samples = record["samples"]
    found = {name: [sample["scores"][name] for sample in samples] for name in samples[0]["scores"]}
    return {
        name: Score(name, [tuple(value) if isinstance(value, list) else (value, 1.0) for value in values])
        for name, values in found.items()
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
    def difference(self) -> Score:
        factor = 1 if self.first.likelihood else 100
        rows = zip(self.first.rows, self.second.rows, strict=True)
        return Score("difference", [(factor * (b - a), weight) for (a, weight), (b, _) in rows])

    @property
    def interval(self) -> tuple[float, float]:
        difference = self.difference
        return difference.mean - difference.reach, difference.mean + difference.reach

    @property
    def verdict(self) -> str:
        if not math.isfinite(self.difference.mean):
            return NOT_FINITE
        if not any(difference for difference, _ in self.difference.rows):
            return ALIKE
        if len(self.first.rows) < ROWS:
            return TOO_FEW
        low, high = self.interval
        return "better" if low > 0 else "worse" if high < 0 else TOO_FEW


def pair(first: dict[str, Any], second: dict[str, Any], metric: str) -> Pair | None:
    """The pair of two records of one item; None if the rows differ, as those of needle tasks do between tokenizers."""
    hashes = [[sample["doc_hash"] for sample in record["samples"]] for record in (first, second)]
    if hashes[0] != hashes[1]:
        return None
    return Pair(scores(first)[metric], scores(second)[metric])


def guessing(record: dict[str, Any]) -> float | None:
    """The accuracy of choosing an answer at random; None for tasks without choices."""
    choices = [sample["choices"] for sample in record["samples"]]
    return statistics.fmean(1 / count for count in choices) if min(choices) > 1 else None
