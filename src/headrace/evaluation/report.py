"""The report of an evaluation."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import lm_eval
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..files.environment import environments
from ..report.differences import Difference, answer, judged
from ..report.differences import table as table_of_differences
from ..report.numbers import significant
from ..report.page import PALETTE, SOFT, STYLE, Page, Section, picture
from .run import Evaluation
from .scores import NATS, POINTS, baseline, beaten, difference, scores, shown_metric

HEAD = ("task", "metric", "rows", "baseline")
SCORES = ("task", "metric", "higher_is_better", "model", "rows", "score", "standard_error", "baseline")
ABOUT_SCORES = (
    "The baseline is the accuracy of guessing or, for a perplexity, that of a unigram model that knows the frequencies "
    "of a model's tokens in this text but no context. * does not beat it: accuracies by a binomial test at 2.5 %."
)
ABOUT_PAIRS = (
    "Mean difference over the same rows, so that the difficulty of a row cancels, in points of accuracy or nats of "
    "log-likelihood per word, byte or row. Above 0, the model is better; p by Student's t, corrected by Holm's rule "
    "over all differences of this report."
)


def report(evaluation: Evaluation, paths: dict[str, str], output: Path) -> Page:
    """The report, whose picture is saved in the folder `output`. paths: name -> path of each checkpoint."""
    plan, found = evaluation.plan, against_the_first(evaluation)
    about = (
        f"{plan.suite} by lm-evaluation-harness {lm_eval.__version__}"
        f"{f', the first {plan.limit} rows of each task' if plan.limit else ''}"
        f"{f', rows from {plan.data}' if plan.data else ''}. "
        "The number after ± is the standard error over rows, for perplexities by the delta method."
    )
    first = Section(
        about=(ABOUT_SCORES,),
        header=[*HEAD, *evaluation.items],
        rows=table(evaluation),
        sentences=list(findings(evaluation)),
        details=how(evaluation, paths),
    )
    records = [record for own in evaluation.items.values() for record in own.values()]
    made = [one | {"lm_eval": lm_eval.__version__, "seed": plan.seed} for one in environments(records)]
    sections = [first, *([differences(found, output)] if found else [])]
    return Page("Evaluation", [about], sections, made, f"{answer(found)}." if found else "")


def findings(evaluation: Evaluation) -> Iterator[str]:
    """Sentences on what was not run as asked."""
    for name, reason in evaluation.missing.items():
        yield f"{name} was not run: {reason}."
    for item, record in next(iter(evaluation.items.values())).items():
        others = {name for sample in record["samples"] for name in sample["scores"]} - {*metrics(evaluation, item)}
        if others and "@" not in item:  # other lengths of a needle task
            yield f"{', '.join(sorted(others))} of {item}: not shown, no rows from 0 (worst) to 1; see results.json."
    for model, records in evaluation.items.items():
        length = next(iter(records.values()))["trained_length"]
        longer = [name for name, record in records.items() if length and record["max_length"] > length]
        if longer:
            yield f"The config of {model} gives a context of {length} tokens; {', '.join(longer)} used a longer one."
    one, *more = evaluation.items.values()
    if unlike := [n for n in one if any(own[n]["max_length"] != one[n]["max_length"] for own in more)]:
        yield f"The models' contexts differ in {', '.join(unlike)} (see Settings); --max-length gives them one."


def metrics(evaluation: Evaluation, item: str) -> list[str]:
    """Those that are scores of every model."""
    first, *others = (scores(records[item]) for records in evaluation.items.values())
    return [name for name in first if all(name in other for other in others)]


def against_the_first(evaluation: Evaluation) -> list[Difference]:
    """The differences of each model from the first in every metric, corrected over all that can have a verdict."""
    (first, base), *others = evaluation.items.items()
    found = [
        difference(model, first, item, name, {model: record, first: base[item]})
        for model, records in others
        for item, record in records.items()
        for name in metrics(evaluation, item)
    ]
    return judged([found])[0]


def table(evaluation: Evaluation) -> list[list[str]]:
    """A row for each item and metric: their names, the number of rows, the baseline (each, where those of the models
    differ), and the score of each model, with * if it does not beat its baseline."""
    rows = []
    for item in next(iter(evaluation.items.values())):
        for metric in metrics(evaluation, item):
            own = [(scores(records[item])[metric], records[item]) for records in evaluation.items.values()]
            score, bases = own[0][0], [baseline(*each) for each in own]
            shown = ["–" if x is None else significant(x) if score.likelihood else f"{100 * x:.1f} %" for x in bases]
            known = ", ".join(dict.fromkeys(shown))
            cells = [str(one) + "*" * (not beaten(one, of)) for one, of in own]
            rows.append([item, shown_metric(item, metric), f"{len(score.rows):,}", known, *cells])
    return rows


def write_scores(evaluation: Evaluation, path: Path) -> None:
    """Writes a CSV file with a line for each task, metric and model. Accuracies, of which higher is better, and their
    baselines are from 0 to 1. A score that is not finite is empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(SCORES)
        for item in next(iter(evaluation.items.values())):
            for metric, (model, records) in product(metrics(evaluation, item), evaluation.items.items()):
                score, record = scores(records[item])[metric], records[item]
                numbers = [x if math.isfinite(x) else None for x in (score.value, score.stderr)]
                named = item, shown_metric(item, metric), int(not score.likelihood), model
                writer.writerow([*named, len(score.rows), *numbers, baseline(score, record)])


def differences(found: Sequence[Difference], output: Path) -> Section:
    """The table of all differences, with a picture of those that have an interval."""
    header, *rows = table_of_differences(found, "task")
    known = [one for one in found if math.isfinite(one.mean.reach)]
    caption = "Differences with 95 % intervals. An interval that contains 0 does not tell the two apart."
    drawn = [picture(caption, forest(known), output / "differences.png")] if known else []
    return Section("Differences", (ABOUT_PAIRS,), header=header, rows=rows, pictures=drawn)


def forest(differences: Sequence[Difference]) -> Figure:
    """A figure with a panel for each unit. All perplexities of a task are of one log-likelihood: the first is drawn."""
    panels = {unit: [one for one in differences if one.unit == unit] for unit in (POINTS, NATS)}
    panels = {unit: own for unit, own in panels.items() if own}
    names = {unit: [*dict.fromkeys(map(label, own))] for unit, own in panels.items()}
    models = [*dict.fromkeys(one.a for one in differences)]
    heights = [len(own) * (0.5 + 0.5 * len(models)) for own in names.values()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, len(panels) + 0.36 * sum(heights)), layout="constrained")
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for ax, (unit, own) in zip(grid, panels.items(), strict=True):
            draw(ax, own, names[unit], models)
            ax.set_xlabel(f"{unit.name}: below 0 worse, above 0 better")
        if len(models) > 1:
            grid[0].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def label(one: Difference) -> str:
    return one.where.partition(" ")[0] if one.unit == NATS else one.where


def draw(ax: Axes, differences: Sequence[Difference], names: list[str], models: list[str]) -> None:
    """Each of the models, which need not all be in the panel, has its colour."""
    ax.axvline(0, color=SOFT, lw=1)
    for i, model in enumerate(models):
        own = {label(one): one for one in reversed(differences) if one.a == model}
        y = [names.index(name) + i / (len(models) + 1) for name in own]
        mean, reach = ([getattr(one.mean, x) * one.unit.scale for one in own.values()] for x in ("value", "reach"))
        ax.errorbar(mean, y, xerr=reach, fmt="o", ms=5, capsize=3, color=PALETTE[i % len(PALETTE)], label=model)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)


def how(evaluation: Evaluation, paths: dict[str, str]) -> Section:
    rows: list[list[Any]] = [
        [model, paths[model], item, f"{record['max_length']:,}", f"{record['seconds']:,.1f}"]
        for model, records in evaluation.items.items()
        for item, record in records.items()
    ]
    settings = ", ".join(f"{name} {value}" for name, value in asdict(evaluation.plan).items() if value is not None)
    header = ("model", "checkpoint", "task", "tokens of context", "seconds")
    return Section("Settings", about=(settings,), header=header, rows=rows)
