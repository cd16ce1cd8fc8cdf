"""The findings of an evaluation as sentences, failures first. Each sentence follows from the scores by a fixed rule."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..report.numbers import significant
from ..report.stats import LEVEL, holm
from .run import Evaluation
from .scores import ALIKE, NOT_FINITE, TOO_FEW, Pair, Score, guessing, pair, scores

OTHER_ROWS = "not comparable, as the rows differ,"


def findings(evaluation: Evaluation) -> list[str]:
    rules = (not_run, beyond, not_finite, failures, differences)
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


def differences(evaluation: Evaluation) -> Iterator[str]:
    for model, comparisons in against_the_first(evaluation).items():
        first = next(iter(evaluation.items))
        for verdict in ("better", "worse", TOO_FEW, ALIKE, OTHER_ROWS, NOT_FINITE):
            if named := [comparison.name for comparison in comparisons if comparison.verdict == verdict]:
                where = ", ".join(named) if len(named) < len(comparisons) else "every metric"
                yield f"{model} compared with {first}: {verdict} in {where}."


@dataclass(frozen=True)
class PairedComparison:
    """A model compared with the first in one metric. `pair` is None if the two were evaluated on different rows.
    corrected: p by Holm over all comparisons of the evaluation."""

    item: str
    metric: str
    pair: Pair | None
    corrected: float = math.nan

    @property
    def name(self) -> str:
        return f"{self.item} {shown_metric(self.item, self.metric)}"

    @property
    def verdict(self) -> str:
        if self.pair is None:
            return OTHER_ROWS
        if (reason := self.pair.undecided) is not None:
            return reason
        if not self.corrected < 1 - LEVEL:
            return TOO_FEW
        return "better" if self.pair.difference.value > 0 else "worse"

    def cells(self) -> tuple[str, ...]:
        """Cells of a table row: task, metric, difference, its standard error, its 95 % interval, p, p by Holm,
        verdict."""
        names = self.item, shown_metric(self.item, self.metric)
        if self.pair is None or self.verdict == NOT_FINITE:
            return *names, *"–––––", self.verdict
        digits = ".4f" if self.pair.first.likelihood else ".1f"
        mean = self.pair.difference
        low, high = mean.interval
        interval = f"{low:+{digits}} to {high:+{digits}}"
        size = f"{mean.value:+{digits}} {self.pair.unit}", f"± {mean.error:{digits}}", interval
        p = ("–", "–") if math.isnan(self.corrected) else (f"{mean.p:.2g}", f"{self.corrected:.2g}")
        return *names, *size, *p, self.verdict


def against_the_first(evaluation: Evaluation) -> dict[str, list[PairedComparison]]:
    """Model -> its comparison with the first model in every metric, corrected over all that can have a verdict."""
    (_, base), *others = evaluation.items.items()
    found = {
        model: [
            PairedComparison(item, name, pair(base[item], record, name))
            for item, record in records.items()
            for name in scores(record)
        ]
        for model, records in others
    }
    able = [one for own in found.values() for one in own if one.pair is not None and one.pair.undecided is None]
    corrected = dict(zip(map(id, able), holm([one.pair.difference.p for one in able if one.pair]), strict=True))
    return {
        model: [replace(one, corrected=corrected.get(id(one), math.nan)) for one in own] for model, own in found.items()
    }


def show(score: Score) -> str:
    """The score and its standard error as text."""
    if not math.isfinite(score.value):
        return "not finite"
    if score.likelihood:
        return f"{significant(score.value)} ± {significant(score.stderr, 2)}"
    return f"{100 * score.value:.1f} ± {100 * score.stderr:.1f} %"


def shown_metric(item: str, metric: str) -> str:
    """The name of a metric in reports; for a needle task, whose metric the harness names by its length, "found"."""
    return "found" if metric == item.rpartition("@")[2] else metric


def table(evaluation: Evaluation) -> list[list[str]]:
    """A row for each item and metric: their names, the number of rows, and the score of each model."""
    first = next(iter(evaluation.items.values()))
    return [
        [item, shown_metric(item, metric), f"{len(score.rows):,}"]
        + [show(scores(records[item])[metric]) for records in evaluation.items.values()]
        for item, record in first.items()
        for metric, score in scores(record).items()
    ]
