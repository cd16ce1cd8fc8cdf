"""What guessing by frequency alone would score: no model that reads its context should do worse."""

import math
from collections import Counter
from typing import Any


def unigram(samples: list[dict[str, Any]], model: Any) -> dict[str, float]:
    """Perplexities of the evaluated tokens under the frequencies of all tokens in the very same rows, in the units of
    the metrics they are named by; empty for tasks without a perplexity. `model` is the harness's, for its tokenizer."""
    metrics = [name for name in samples[0]["metrics"] if name.endswith("perplexity")]
    if not metrics:
        return {}
    rows = [split(sample["arguments"][0], model) for sample in samples]
    counts = Counter(token for before, scored in rows for token in (*before, *scored))
    total = counts.total()
    nats = -sum(math.log(counts[token] / total) for _, scored in rows for token in scored)
    return {name: math.exp(nats / sum(weight(sample[name]) for sample in samples)) for name in metrics}


def split(arguments: tuple[str, ...], model: Any) -> tuple[list[int], list[int]]:
    """Tokens of the context, and those that are scored."""
    if len(arguments) == 1:
        return [], model.tok_encode(arguments[0])
    before, whole = model.tok_encode(arguments[0]), model.tok_encode(arguments[0] + arguments[1])
    return before, whole[len(before) :]


def weight(score: Any) -> float:
    """Words or bytes of a row, where its score has them; else a row counts one."""
    return score[1] if isinstance(score, tuple | list) else 1.0
