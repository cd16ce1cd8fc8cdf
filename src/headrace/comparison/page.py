"""Writes the report of a comparison: PNG pictures, and report.html with the pictures as SVG."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from ..report.differences import Difference, table
from ..report.page import Name, Page, Picture, Section, picture
from ..tasks.base import ByRow, ByToken
from ..tasks.check import description
from ..training.gate_statistics import FAILURES
from . import hypotheses, tuning
from .findings import conditions, findings, headline, judged, of_sweep
from .plots import colours, draw, draw_sweep
from .rows import rows, write
from .summary import Comparison, Contender, Sweep, show, show_contender, show_scores, summarize, task_of

SHOWN = 3  # number of findings shown; the rest are folded
HEADER = ("mixer", "held-out score", "per seed", "parameters", "state, numbers", "training tokens/s")
SIZES = ("mixer", "expression", "heads", "state per layer", "gate parameters", "MLP width", "FLOPs per row")
DIFFERENCES = (
    "Gains are paired by seed, above 0 if the first is better; p by Student's t, corrected by Holm's rule over all "
    "differences of this report. If gains are normally distributed, equal models get a verdict in at most one report "
    "of twenty; if each run either learns the task or does not, three seeds give one in up to 3.1 % of differences."
)
EQUAL = (
    "Every mixer trains on the same data in the same order and, without a search, at the same learning rate; a mixer "
    "and its softmax version start from the same weights. The state is the numbers that a model keeps of one sequence "
    "at the end of a row; a key-value cache grows with every token. FLOPs are of a forward pass; softmax attention "
    "counts masked pairs of tokens too. Speed is the median over the intervals between evaluations ± half its "
    "interquartile range, of models trained side by side; tokens are positions of rows or, if a task has sources, of "
    "these. headrace bench measures models in turn. In the folder of this page, results.json has all scores of every "
    "seed over time, and runs.csv a row for each run."
)


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Draws the pictures, writes them and report.html into the folder, and returns the path of report.html."""
    write(rows(results), folder / "runs.csv")
    return report(results, folder).write(folder / "report.html")


def report(results: dict[str, Any], folder: Path | None) -> Page:
    """The report of a results.json, with pictures, which are saved in the folder too. None: as the terminal shows it,
    without pictures and, of a sweep, without a section for each value."""
    comparisons, over, asked = summarize(results), Sweep.of(results), hypotheses.of_results(results)
    if asked is not None:
        answer, sections = asked
    else:
        tests = judged(comparisons)
        answer, sections = headline(comparisons, tests), [differences(tests)] if any(tests) else []
    sections += [tuning.section(c, results) for c in comparisons if c.plan["tuning"]]
    sections += [sweep_section(over, folder)] if over else []
    shown = [] if over and folder is None else comparisons
    sections += [part for c in shown for part in (section(c, folder), *by_length(c))]
    about = [" ".join([f"{c.plan['name']}:", *said]) for c in comparisons if (said := conditions(c))]
    return Page(results["study"]["title"], about, sections, results["environments"], answer, results["command"])


def sweep_section(over: Sweep, folder: Path | None) -> Section:
    """A row for each mixer, with its score at every value."""
    rows = [
        [name(next(iter(own.values())), over.comparisons[0]),
         *(show_contender(own[value]) if value in own else "–" for value in over.values)]
        for own in over.mixers.values()
    ]  # fmt: skip
    return Section(
        title=f"By {over.field}",
        header=("mixer", *(f"{over.field}={value}" for value in over.values)),
        rows=rows,
        sentences=of_sweep(over),
        shown=SHOWN,
        pictures=saved(draw_sweep(over), folder, f"by-{over.field}") if folder else (),
    )


def differences(tests: Sequence[Sequence[Difference]]) -> Section:
    """A row for each difference that the report judges."""
    header, *rows = table([one for own in tests for one in own], "comparison")
    return Section("Differences", (DIFFERENCES,), header=header, rows=rows)


def section(comparison: Comparison, folder: Path | None) -> Section:
    return Section(
        title=comparison.plan["name"],
        content=described(task_of(comparison.plan["task"])),
        header=HEADER,
        rows=[[name(c, comparison), *cells(c)] for c in comparison.shown],
        sentences=findings(comparison),
        shown=SHOWN,
        pictures=saved(draw(comparison), folder, comparison.plan["name"]) if folder else (),
        details=settings(comparison),
    )


def by_length(comparison: Comparison) -> list[Section]:
    """The scores in rows of other lengths, of a task that is tested at several."""
    tested = [] if comparison.many else [c for c in comparison.shown if c.by_length]
    lengths = sorted({n for c in tested for n in c.by_length})
    rows = [
        [name(c, comparison), *(show_scores(c.metric, c.by_length[n]) if n in c.by_length else "–" for n in lengths)]
        for c in tested
    ]
    title, longest = f"{comparison.plan['name']}: by length of row or source", comparison.plan["length"]
    about = f"Mean and standard deviation over the seeds that did not diverge; {longest} is the longest in training."
    return [Section(title, (about,), header=("mixer", *map(str, lengths)), rows=rows)] if tested else []


def described(task: Any) -> Markup:
    """The task as it describes itself, with a row, and the score of guessing."""
    about, row, more = description(task)
    paragraph, drawn = Markup('<p class="about">{}</p>').format, Markup('<pre class="row">{}</pre>').format
    return paragraph(about) + drawn(row) + paragraph(" ".join([*more, guessing(task)]))


def guessing(task: Any) -> str:
    """A sentence with the score of uniform guesses."""
    if task.metric is ByRow.metric and isinstance(task, ByRow):
        return "Uniform guesses are almost never right on a whole target: chance is about 0 %."
    entropy = task.metric.name == "loss"
    if not (entropy or hasattr(task, "chance") or isinstance(task, ByToken)):
        return ""
    score = math.log(task.vocab_size) if entropy else getattr(task, "chance", 1 / task.vocab_size)
    return f"Uniform guesses score {show(task.metric, score)}."


def settings(comparison: Comparison) -> Section:
    kept = ("task", "length", "shape", "recipe", "seeds")
    return Section(
        title="Settings and sizes",
        about=(EQUAL, FAILURES),
        header=SIZES,
        rows=[[name(c, comparison), *sizes(c, comparison.plan["shape"])] for c in comparison.shown],
        listing=json.dumps({key: comparison.plan[key] for key in kept}, indent=2),
    )


def name(contender: Contender, comparison: Comparison) -> Name:
    return Name(contender.label, colours(comparison)[contender.mixer], contender.mixer)


def cells(c: Contender) -> list[str]:
    seeds = [show(c.metric, c.by_seed[arm["seed"]]) if arm["seed"] in c.by_seed else "diverged" for arm in c.arms]
    each = " · ".join(seed.removesuffix(c.metric.unit).strip() for seed in seeds)
    return [show_contender(c), each, f"{c.constant('parameters'):,}", f"{c.state:,}", c.speed]


def sizes(c: Contender, shape: dict[str, Any]) -> list[str]:
    numbers = (c.constant(field) for field in ("gate_parameters", "intermediate_size", "flops"))
    heads = c.spec.num_heads(shape["hidden_size"], shape["heads"])
    own = (heads, f"{c.state / shape['layers']:,.0f}")
    return [c.mixer, *map(str, own), *("–" if number is None else f"{number:,}" for number in numbers)]


def saved(drawn: dict[str, tuple[str, Figure]], folder: Path, name: str) -> list[Picture]:
    return [picture(caption, figure, folder / f"{name}-{kind}.png") for kind, (caption, figure) in drawn.items()]
