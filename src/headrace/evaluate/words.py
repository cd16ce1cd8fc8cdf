"""What an evaluation showed, in plain words: failures first. Every sentence follows from the scores by a rule."""

from collections.abc import Iterator
from typing import Any

from .run import Evaluation
from .scores import INTERVAL, Pair, Score, guessing, pair, scores

TOO_FEW = "too few rows to tell them apart"
OTHER_ROWS = "not the same rows, so nothing is paired,"


def words(evaluation: Evaluation) -> list[str]:
    return [sentence for rule in (not_run, beyond, failures, duels) for sentence in rule(evaluation)]


def not_run(evaluation: Evaluation) -> Iterator[str]:
    for name, reason in evaluation.missing.items():
        yield f"{name} was not run: {reason}."


def beyond(evaluation: Evaluation) -> Iterator[str]:
    for model, records in evaluation.items.items():
        length = next(iter(records.values()))["trained_length"]
        longer = [name for name, record in records.items() if length and record["max_length"] > length]
        if longer:
            yield f"{model} has a context of {length} tokens by its config; it is given more in {', '.join(longer)}."


def failures(evaluation: Evaluation) -> Iterator[str]:
    for model, records in evaluation.items.items():
        every = [(item, record, score) for item, record in records.items() for score in scores(record).values()]
        if guessed := [text for row in every for text in at_chance(*row)]:
            yield f"{model} is at chance level in {', '.join(guessed)}."
        for item, record, score in every:
            yield from worse_than_frequencies(model, item, record, score)


def at_chance(item: str, record: dict[str, Any], score: Score) -> Iterator[str]:
    if score.likelihood:
        return
    chance = guessing(record)
    if chance is None and score.value == 0:
        yield f"{item} (0 of {len(score.rows)} rows)"
    elif chance is not None and score.value - INTERVAL * score.stderr <= chance:
        yield f"{item} ({score.metric} {show(score)}; guessing {100 * chance:.1f} %)"


def worse_than_frequencies(model: str, item: str, record: dict[str, Any], score: Score) -> Iterator[str]:
    if score.value > (bound := record["unigram"].get(score.metric, float("inf"))):
        yield (
            f"{model} on {item}: {score.metric.replace('_', ' ')} {score.value:,.4g} is above {bound:,.4g}, "
            "the unigram's: the frequencies of the text's own tokens, without any context, predict it better."
        )


def duels(evaluation: Evaluation) -> Iterator[str]:
    for model, rows in against_the_first(evaluation).items():
        first = next(iter(evaluation.items))
        for verdict in ("better", "worse", TOO_FEW, OTHER_ROWS):
            if named := [f"{row['item']} {row['metric']}" for row in rows if row["verdict"] == verdict]:
                yield f"{model} against {first}: {verdict} in {', '.join(named)}."


def against_the_first(evaluation: Evaluation) -> dict[str, list[dict[str, str]]]:
    """By model: item, metric, paired difference and verdict, of every metric."""
    (_, base), *others = evaluation.items.items()
    return {
        model: [
            {"item": item, "metric": metric, **judged(pair(base[item], record, metric))}
            for item, record in records.items()
            for metric in scores(record)
        ]
        for model, records in others
    }


def judged(found: Pair | None) -> dict[str, str]:
    if found is None:
        return {"difference": "", "verdict": OTHER_ROWS}
    low, _ = found.interval
    verdict = ("better" if low > 0 else "worse") if found.clear else TOO_FEW
    return {"difference": difference(found), "verdict": verdict}


def difference(found: Pair) -> str:
    """In points of per cent, or nats of log-likelihood per word, byte or row; above 0 is better."""
    likelihood = found.first.likelihood
    factor, unit = (1, "nats") if likelihood else (100, "points")
    low, high = (factor * end for end in found.interval)
    digits = ".4f" if likelihood else ".1f"
    return f"{factor * found.difference.mean:+{digits}} {unit} (95 % interval {low:+{digits}} to {high:+{digits}})"


def show(score: Score) -> str:
    """With the standard error."""
    if score.likelihood:
        return f"{score.value:,.4g} ± {score.stderr:.2g}"
    return f"{100 * score.value:.1f} ± {100 * score.stderr:.1f} %"


def table(evaluation: Evaluation) -> list[dict[str, Any]]:
    """A row for each item and metric: its name, its number of rows, and what each model scored."""
    first = next(iter(evaluation.items.values()))
    return [
        {
            "item": item,
            "metric": metric if metric != item.rpartition("@")[2] else "found",
            "rows": len(score.rows),
            "shown": [show(scores(records[item])[metric]) for records in evaluation.items.values()],
        }
        for item, record in first.items()
        for metric, score in scores(record).items()
    ]
