"""The report of an evaluation."""

from dataclasses import asdict
from typing import Any

import lm_eval

from ..files.environment import environment
from ..report.differences import answer
from ..report.differences import table as table_of_differences
from ..report.page import Page, Section
from .findings import against_the_first, findings, table
from .run import Evaluation

HEAD = ("task", "metric", "rows", "baseline")
ABOUT_SCORES = (
    "The baseline is the accuracy of guessing or, for a perplexity, that of a unigram model that knows the token "
    "frequencies of this text but no context. * does not beat it: accuracies by a binomial test."
)
ABOUT_PAIRS = (
    "Mean difference over the same rows, so that the difficulty of a row cancels, in points of accuracy or nats of "
    "log-likelihood per word, byte or row. Above 0, the model is better; p by Student's t, corrected by Holm's rule "
    "over all differences of this report."
)


def report(evaluation: Evaluation, paths: dict[str, str]) -> Page:
    """The report. paths: name -> path of each checkpoint."""
    plan, judged = evaluation.plan, against_the_first(evaluation)
    about = (
        f"{plan.suite} by lm-evaluation-harness {lm_eval.__version__}"
        f"{f', the first {plan.limit} rows of each task' if plan.limit else ''}"
        f"{f', rows from {plan.data}' if plan.data else ''}. "
        "The number after ± is the standard error over rows, for perplexities by the delta method."
    )
    said, rows, settings = findings(evaluation), table(evaluation), how(evaluation, paths)
    scores = Section(
        about=(ABOUT_SCORES,), sentences=said, header=[*HEAD, *evaluation.items], rows=rows, details=settings
    )
    made = {"lm_eval": lm_eval.__version__, "seed": plan.seed}
    header, *lines = table_of_differences(judged, "task")
    differences = Section("Differences", (ABOUT_PAIRS,), header=header, rows=lines)
    sections = [scores, *([differences] if judged else [])]
    main = f"{answer(judged)}." if judged else ""
    return Page("Evaluation", [about], sections, [environment() | made], main)


def how(evaluation: Evaluation, paths: dict[str, str]) -> Section:
    rows: list[list[Any]] = [
        [model, paths[model], item, f"{record['max_length']:,}", f"{record['seconds']:,.1f}"]
        for model, records in evaluation.items.items()
        for item, record in records.items()
    ]
    settings = ", ".join(f"{name} {value}" for name, value in asdict(evaluation.plan).items() if value is not None)
    header = ("model", "checkpoint", "task", "tokens of context", "seconds")
    return Section("Settings", about=(settings,), header=header, rows=rows)
