"""Perplexity of a unigram model, a baseline that every model that uses its context should beat."""

import math
from collections import Counter
from typing import Any


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
    return {name: math.exp(nats / sum(weight(sample[name]) for sample in samples)) for name in metrics}


def split(arguments: tuple[str, ...], model: Any) -> tuple[list[int], list[int]]:
    """(tokens of the context, scored tokens) of a row."""
    if len(arguments) == 1:
        return [], model.tok_encode(arguments[0])
    before, whole = model.tok_encode(arguments[0]), model.tok_encode(arguments[0] + arguments[1])
    return before, whole[len(before) :]


def weight(score: Any) -> float:
    """Words or bytes of a row if the score includes them, else 1."""
    return score[1] if isinstance(score, tuple | list) else 1.0
