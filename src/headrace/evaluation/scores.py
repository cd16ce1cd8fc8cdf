"""Scores with standard errors over rows, their baselines, and differences of two models on the same rows."""

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..report import stats
from ..report.differences import Difference, Unit
from ..report.numbers import significant
from ..report.stats import Mean

# Fewest rows for a verdict on two models: with 10 or more, equal models are told apart in at most 6.5 % of cases, for
# rows that are right or wrong and for log-likelihoods of rows of unequal length (test_evaluate.py).
ROWS = 10
FEW, EQUAL, OTHER, NOT_FINITE = "too few rows", "equal on every row", "other rows", "a score is not finite"
NATS = Unit("nats of log-likelihood per word, byte or row", "nats", 4, noun="row")
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

    def __str__(self) -> str:
        """The score and its standard error, which is not known for a single row."""
        if not math.isfinite(self.value):
            return "not finite"
        value, error, unit = f"{100 * self.value:.1f}", f"{100 * self.stderr:.1f}", " %"
        if self.likelihood:
            value, error, unit = significant(self.value), significant(self.stderr, 2), ""
        return f"{value} ± {error}{unit}" if math.isfinite(self.stderr) else f"{value}{unit}"


def scores(record: dict[str, Any]) -> dict[str, Score]:
    """Metric -> score of a recorded item: functions of log-likelihoods, and means of rows from 0 to 1 of which more is
    better. Others are left out: F1, whose rows are labels and guesses, or the other lengths of a needle task, -1."""
    by_item = record.get("results", {}).get("higher_is_better", {}).values()
    lower = {name for metrics in by_item for name, higher in metrics.items() if higher is False}
    rows: dict[str, list[Any]] = {}
    for name, value in (pair for sample in record["samples"] for pair in sample["scores"].items()):
        rows.setdefault(name, []).append(value)
    found = {}
    for name, own in rows.items():
        score = Score(name, [tuple(x) if isinstance(x, list) else (x, 1.0) for x in own])
        shares = all(isinstance(x, int | float) and not (x < 0 or x > 1) for x in own)  # NaN is one
        if score.likelihood or (shares and name.partition(",")[0] not in lower):
            found[name] = score
    return found


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
    equal = all(a == b for (a, _), (b, _) in rows)
    reasons = {NOT_FINITE: not math.isfinite(mean.value), EQUAL: equal, FEW: mean.n < ROWS}
    undecided = next((why for why, holds in reasons.items() if holds), None)
    return Difference(model, first, mean, mean.p, unit, where, undecided=undecided)


def shown_metric(item: str, metric: str) -> str:
    """The name of a metric in reports; for a needle task, whose metric the harness names by its length, "found"."""
    return "found" if metric == item.rpartition("@")[2] else metric


# --- baselines -------------------------------------------------------------------------------------------------------
def baseline(score: Score, record: dict[str, Any]) -> float | None:
    """What a score should beat: the accuracy of guessing, 0 for a task without choices; the perplexity of a unigram
    model that knows the token frequencies of the text but no context."""
    if score.likelihood:
        return record["unigram"].get(score.metric)
    choices = [sample["choices"] for sample in record["samples"]]
    return fmean(1 / count for count in choices) if min(choices) > 1 else 0.0


def beaten(score: Score, record: dict[str, Any]) -> bool:
    """Whether a score is better than its baseline, by a binomial test where that is the accuracy of guessing."""
    value = baseline(score, record)
    if value is None or not math.isfinite(score.value):
        return True
    if score.likelihood:
        return score.value <= value
    return stats.above(round(sum(right for right, _ in score.rows)), len(score.rows), value)


def unigram(samples: list[dict[str, Any]], model: Any) -> dict[str, float]:
    """Metric -> perplexity of the evaluated tokens under the frequencies of all tokens in the same rows, in the unit of
    the metric; empty for tasks without a perplexity. `model` is the harness's model, which has the tokenizer."""
    metrics = [name for name in samples[0]["metrics"] if name.endswith("perplexity")]
    if not metrics:
        return {}
    rows = [split(sample["arguments"][0], model) for sample in samples]
    counts = Counter(token for before, scored in rows for token in (*before, *scored))
    total = counts.total()
    nats = -sum(math.log(counts[token] / total) for _, scored in rows for token in scored)
    return {name: exponential(nats / sum(weight(sample[name]) for sample in samples)) for name in metrics}


def split(arguments: tuple[str, ...], model: Any) -> tuple[list[int], list[int]]:
    """(tokens of the context, scored tokens) of a row."""
    if len(arguments) == 1:
        return [], model.tok_encode(arguments[0])
    before, whole = model.tok_encode(arguments[0]), model.tok_encode(arguments[0] + arguments[1])
    return before, whole[len(before) :]


def weight(score: Any) -> float:
    """Words or bytes of a row if the score includes them, else 1."""
    return score[1] if isinstance(score, tuple | list) else 1.0
