"""Scores with standard errors from what each row scored, and differences of two models on the same rows."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

INTERVAL = 1.96  # standard errors on either side hold 95 % of a normal distribution
TOO_FEW = "too few rows to tell them apart"
ALIKE = "alike on every row"
Rows = list[tuple[float, float]]  # of each row: what is summed, and its weight


@dataclass(frozen=True)
class Score:
    """`mean` is per unit of weight: an accuracy, or a log-likelihood per word, byte or row."""

    metric: str
    rows: Rows

    @property
    def mean(self) -> float:
        return sum(value for value, _ in self.rows) / sum(weight for _, weight in self.rows)

    @property
    def error(self) -> float:
        """Standard error of the mean: of a ratio of sums, where rows differ in weight. Infinite for one row."""
        n, mean = len(self.rows), self.mean
        if n < 2:
            return math.inf
        squares = sum((value - mean * weight) ** 2 for value, weight in self.rows)
        return math.sqrt(squares * n / (n - 1)) / sum(weight for _, weight in self.rows)

    @property
    def likelihood(self) -> bool:
        """Made of log-likelihoods, and better when lower."""
        return self.metric.endswith("perplexity") or self.metric == "bits_per_byte"

    @property
    def value(self) -> float:
        if self.metric == "bits_per_byte":
            return -self.mean / math.log(2)
        return math.exp(-self.mean) if self.likelihood else self.mean

    @property
    def stderr(self) -> float:
        """By the delta method for perplexities."""
        if self.metric == "bits_per_byte":
            return self.error / math.log(2)
        return self.value * self.error if self.likelihood else self.error


def scores(record: dict[str, Any]) -> dict[str, Score]:
    """The metrics of a recorded item. A needle's other lengths, which the harness gives -1, are left out."""
    samples = record["samples"]
    found = {name: [sample["scores"][name] for sample in samples] for name in samples[0]["scores"]}
    return {
        name: Score(name, [tuple(value) if isinstance(value, list) else (value, 1.0) for value in values])
        for name, values in found.items()
        if values != [-1.0] * len(values)
    }


@dataclass(frozen=True)
class Pair:
    """One score less another, row by row: in points of per cent, or in nats of log-likelihood per word, byte or row.

    Above 0 is better."""

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
        mean, reach = self.difference.mean, INTERVAL * self.difference.error
        return mean - reach, mean + reach

    @property
    def verdict(self) -> str:
        if not any(difference for difference, _ in self.difference.rows):
            return ALIKE
        low, high = self.interval
        return "better" if low > 0 else "worse" if high < 0 else TOO_FEW


def pair(first: dict[str, Any], second: dict[str, Any], metric: str) -> Pair | None:
    """Of two records of one item; None where the models did not see the same rows (needles are cut by tokenizers)."""
    hashes = [[sample["doc_hash"] for sample in record["samples"]] for record in (first, second)]
    if hashes[0] != hashes[1]:
        return None
    return Pair(scores(first)[metric], scores(second)[metric])


def guessing(record: dict[str, Any]) -> float | None:
    """What drawing an answer at random scores; None where there are none to choose from."""
    choices = [sample["choices"] for sample in record["samples"]]
    return statistics.fmean(1 / count for count in choices) if min(choices) > 1 else None
