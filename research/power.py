"""Could the studies of text have seen a gain of the size that the paper reports?

    python -m research.power      softmax less none in each study of text, as Markdown

The paper's gain is log(P / P') of the word perplexities on WikiText in table 4 of arXiv 2602.01744, without and with
competition, divided by the tokens of a word. It is excluded if the whole 95 % interval of the difference is above it.
"""

import math
from typing import Any

import typer

from benchmarks.record import markdown

from . import study
from .reproduce.experiment import load

TOKENS_PER_WORD = 1.5  # of a tokenizer with 32,000 tokens, on WikiText; an assumption: the paper states no count
WHERE = "text, all tokens"
BACKBONES = "retnet", "gla", "gated-deltanet"  # of the studies text-X


def published_gain(backbone: str) -> float:
    """The nats per token by which competition lowers the loss on WikiText in the paper's table 4."""
    table = load("table-4")
    column = list(table.columns).index("Wiki. ppl")
    perplexity: dict[str, Any] = {row.at["mixer"]: row.published[column] for row in table.rows if row.published}
    return math.log(perplexity[backbone] / perplexity[f"paper-softmax-{backbone}"]) / TOKENS_PER_WORD


def lines() -> list[str]:
    rows = []
    for backbone in BACKBONES:
        name, gain = f"text-{backbone}", published_gain(backbone)
        difference = study.effect(study.by_arm(name)[WHERE], "softmax", "none")
        excluded = "yes" if difference.interval[0] > -gain else "no"
        rows.append([name, str(difference.n), study.cell(difference, 3), f"−{gain:.3f}", excluded])
    return markdown(["study", "seeds", "softmax − none, nats per token", "the paper's", "excluded"], rows)


if __name__ == "__main__":
    typer.run(lambda: print(*lines(), sep="\n"))
