"""Could the studies of text have seen a gain of the size that the paper reports?

    python benchmarks/power.py      a row for each difference of a gated arm from none, as Markdown

The paper's gain is log(P / P') of the word perplexities on WikiText in table 4 of arXiv 2602.01744, without and with
competition, divided by the tokens of a word. It is excluded if the whole 95 % interval of the difference is above it.
"""

import math

import typer

import study
from headrace.studies.reproduce.experiment import load
from record import markdown

TOKENS_PER_WORD = 1.5  # of a tokenizer with 32,000 tokens, on WikiText; an assumption: the paper states no count
WHERE = "text, all tokens"
STUDIES = {  # of table 4's models: their mixer there, and the arms to compare with none
    "text-retnet": ("retnet", ["softmax"]),
    "text-gla": ("gla", ["softmax"]),
    "text-gated-deltanet": ("gated-deltanet", ["softmax"]),
}


def published_gain(mixer: str) -> float:
    """The nats per token by which competition lowers the loss on WikiText in the paper's table 4."""
    column = list(load("table-4").columns).index("Wiki. ppl")
    perplexity = {row.at.get("mixer"): row.published[column] for row in load("table-4").rows if row.published}
    competing = next(name for name in (f"paper-softmax-{mixer}", f"softmax-{mixer}") if name in perplexity)
    return math.log(perplexity[mixer] / perplexity[competing]) / TOKENS_PER_WORD  # type: ignore[operator]


def lines() -> list[str]:
    rows = []
    for name, (mixer, arms) in STUDIES.items():
        values, gain = study.by_arm(name)[WHERE], published_gain(mixer)
        for arm in arms:
            difference = study.effect(values, arm, "none")
            low, high = difference.interval
            excluded = "yes" if low > -gain else "no"
            cells = [f"{difference.value:+.3f} ({low:+.3f} to {high:+.3f})", f"{-gain:+.3f}"]
            rows.append(
                [name, f"{arm} − none", str(difference.n), *(cell.replace("-", "−") for cell in cells), excluded]
            )
    header = ["study", "difference", "seeds", "nats per token", "the paper's", "excluded"]
    return markdown(header, rows)


if __name__ == "__main__":
    typer.run(lambda: print(*lines(), sep="\n"))
