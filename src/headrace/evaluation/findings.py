"""What an evaluation found: the scores beside their baselines, the differences, and what was not run as asked."""

import math
from collections.abc import Iterator
from typing import Any

from ..report.differences import Difference, judged
from ..report.numbers import significant
from .run import Evaluation
from .scores import Score, difference, guessing, scores, shown_metric


def findings(evaluation: Evaluation) -> list[str]:
    return [*not_run(evaluation), *beyond(evaluation)]


def not_run(evaluation: Evaluation) -> Iterator[str]:
    for name, reason in evaluation.missing.items():
        yield f"{name} was not run: {reason}."


def beyond(evaluation: Evaluation) -> Iterator[str]:
    for model, records in evaluation.items.items():
        length = next(iter(records.values()))["trained_length"]
        longer = [name for name, record in records.items() if length and record["max_length"] > length]
        if longer:
            yield f"The config of {model} gives a context of {length} tokens; {', '.join(longer)} used a longer one."


def against_the_first(evaluation: Evaluation) -> list[Difference]:
    """The differences of each model from the first in every metric, corrected over all that can have a verdict."""
    (first, base), *others = evaluation.items.items()
    found = [
        difference(model, first, item, name, {model: record, first: base[item]})
        for model, records in others
        for item, record in records.items()
        for name in scores(record)
    ]
    return judged([found])[0]


def show(score: Score) -> str:
    """The score and its standard error as text."""
    if not math.isfinite(score.value):
        return "not finite"
    if score.likelihood:
        return f"{significant(score.value)} ± {significant(score.stderr, 2)}"
    return f"{100 * score.value:.1f} ± {100 * score.stderr:.1f} %"


def baseline(score: Score, record: dict[str, Any]) -> float | None:
    """What a score should beat: the accuracy of guessing, 0 for a task without choices; the perplexity of a unigram
    model that knows the token frequencies of the text but no context."""
    return record["unigram"].get(score.metric) if score.likelihood else guessing(record) or 0.0


def beaten(score: Score, record: dict[str, Any]) -> bool:
    """Whether a score is better than its baseline, by a binomial test where that is the accuracy of guessing."""
    value = baseline(score, record)
    if value is None or not math.isfinite(score.value):
        return True
    return score.value <= value if score.likelihood else score.above(value)


def table(evaluation: Evaluation) -> list[list[str]]:
    """A row for each item and metric: their names, the number of rows, the baseline, and the score of each model, with
    * if it does not beat the baseline."""
    first, rows = next(iter(evaluation.items.values())), []
    for item, record in first.items():
        for metric, score in scores(record).items():
            value = baseline(score, record)
            shown = "–" if value is None else significant(value) if score.likelihood else f"{100 * value:.1f} %"
            own = [(scores(records[item])[metric], records[item]) for records in evaluation.items.values()]
            cells = [show(one) + "*" * (not beaten(one, of)) for one, of in own]
            rows.append([item, shown_metric(item, metric), f"{len(score.rows):,}", shown, *cells])
    return rows
