"""The findings of an evaluation as sentences, failures first. Each sentence follows from the scores by a fixed rule."""

import math
from collections.abc import Iterator
from typing import Any

from ..report.differences import Difference, judged
from ..report.numbers import significant
from .run import Evaluation
from .scores import Score, difference, guessing, scores, shown_metric


def findings(evaluation: Evaluation) -> list[str]:
    rules = (not_run, beyond, not_finite, failures)
    return [sentence for rule in rules for sentence in rule(evaluation)]


def not_run(evaluation: Evaluation) -> Iterator[str]:
    for name, reason in evaluation.missing.items():
        yield f"{name} was not run: {reason}."


def beyond(evaluation: Evaluation) -> Iterator[str]:
    for model, records in evaluation.items.items():
        length = next(iter(records.values()))["trained_length"]
        longer = [name for name, record in records.items() if length and record["max_length"] > length]
        if longer:
            yield f"The config of {model} gives a context of {length} tokens; {', '.join(longer)} used a longer one."


def not_finite(evaluation: Evaluation) -> Iterator[str]:
    for model, records in evaluation.items.items():
        models_by_item = {
            item: [name for name, score in scores(record).items() if not math.isfinite(score.value)]
            for item, record in records.items()
        }
        if broken := [f"{item} ({', '.join(names)})" for item, names in models_by_item.items() if names]:
            yield f"The score of {model} is not finite on {', '.join(broken)}."


def failures(evaluation: Evaluation) -> Iterator[str]:
    for model, records in evaluation.items.items():
        if guessed := [text for item, record in records.items() if (text := at_chance(item, record))]:
            yield f"{model} cannot be told from chance level on {', '.join(guessed)}."
        for item, record in records.items():
            if above := list(above_the_unigram(record)):
                yield (
                    f"{model} on {item}: {' and '.join(above)}, the value of a unigram model that knows the token "
                    "frequencies of this text but no context."
                )


def at_chance(item: str, record: dict[str, Any]) -> str:
    """The item with the accuracies that are not above guessing; empty if all are above."""
    chance, chosen = guessing(record), [score for score in scores(record).values() if not score.likelihood]
    chosen = [score for score in chosen if math.isfinite(score.value)]
    if chance is None:
        return f"{item} (0 of {len(chosen[0].rows)} rows)" if any(score.value == 0 for score in chosen) else ""
    low = [f"{score.metric} {show(score)}" for score in chosen if not score.above(chance)]
    return f"{item} ({', '.join(low)}; guessing {100 * chance:.1f} %)" if low else ""


def above_the_unigram(record: dict[str, Any]) -> Iterator[str]:
    for metric, score in scores(record).items():
        if score.value > (bound := record["unigram"].get(metric, float("inf"))):
            yield f"{metric.replace('_', ' ')} {significant(score.value)} is above {significant(bound)}"


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


def table(evaluation: Evaluation) -> list[list[str]]:
    """A row for each item and metric: their names, the number of rows, and the score of each model."""
    first = next(iter(evaluation.items.values()))
    return [
        [item, shown_metric(item, metric), f"{len(score.rows):,}"]
        + [show(scores(records[item])[metric]) for records in evaluation.items.values()]
        for item, record in first.items()
        for metric, score in scores(record).items()
    ]
