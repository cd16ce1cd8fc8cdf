"""Could the studies of text have seen a gain of the size that the paper reports?

    python -m research.power      each form of competition less none on text, as Markdown

The paper's gain is log(P / P') of the word perplexities on WikiText in table 4 of arXiv 2602.01744, without and with
competition, over the bytes of a word of WikiText and times the bytes of a token of the study's text. It is excluded if
the whole 95 % interval of the difference is above it.
The paper's models are the published form, `paper-softmax-X`: only its rows judge the paper. `softmax-X`, the default,
is another function, whose interval says what this one does not gain.
"""

import json
import math
from typing import Any, NamedTuple

import typer

from benchmarks.record import markdown, read
from headrace.report import stats

from . import study
from .reproduce.experiment import load

BYTES_PER_WORD = 1_290_590 / 241_211  # of the test split of WikiText-2, as released, with words between spaces
WHERE = "text, all tokens"
PUBLISHED = ("text-published", "gla", "published")


class Judged(NamedTuple):
    """A form of competition less its backbone on text, beside the gain that the paper has for the backbone."""

    study: str
    backbone: str
    form: str  # the study's name of the arm

    @property
    def difference(self) -> stats.Mean:
        """Nats per token."""
        return study.effect(study.by_arm(self.study)[WHERE], self.form, "none")

    @property
    def published_gain(self) -> float:
        """The nats by which the paper's competition lowers the loss of a text as long as a token of the study."""
        return per_word(self.backbone) / BYTES_PER_WORD * bytes_per_token(self.study)

    @property
    def excluded(self) -> bool:
        return self.difference.interval[0] > -self.published_gain


def judged() -> list[Judged]:
    """The published form where its rows are kept, and headrace's default."""
    default = [Judged(f"text-{backbone}", backbone, "softmax") for backbone in ("retnet", "gla", "gated-deltanet")]
    return [*([Judged(*PUBLISHED)] if study.kept(PUBLISHED[0]).exists() else []), *default]


def bytes_per_token(name: str) -> float:
    """The bytes of a token of a study's held-out text."""
    scores = json.loads(read(study.kept(name))[0]["scores"])
    return scores["loss"] / (scores["bits per byte"] * math.log(2))


def per_word(backbone: str) -> float:
    """The nats per word by which competition lowers the loss on WikiText in the paper's table 4."""
    table = load("table-4")
    column = list(table.columns).index("Wiki. ppl")
    perplexity: dict[str, Any] = {row.at["mixer"]: row.published[column] for row in table.rows if row.published}
    return math.log(perplexity[backbone] / perplexity[f"paper-softmax-{backbone}"])


def lines() -> list[str]:
    rows = []
    for one in judged():
        form = f"`{'paper-' if one.form == 'published' else ''}softmax-{one.backbone}`"
        cells = study.cell(one.difference, 3), f"−{one.published_gain:.3f}"
        rows.append([one.study, form, str(one.difference.n), *cells, "yes" if one.excluded else "no"])
    return markdown(
        ["study", "form", "seeds", "less none, nats per token", "the paper's gain", "excluded of this form"], rows
    )


if __name__ == "__main__":
    typer.run(lambda: print(*lines(), sep="\n"))
