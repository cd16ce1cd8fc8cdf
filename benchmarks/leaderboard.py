"""The rows of the leaderboard, benchmarks/results/leaderboard.csv.

headrace compare --suite small --mixers NAME --output FOLDER    the row of a mixer; the same command continues
python benchmarks/leaderboard.py keep FOLDER [FOLDER ...]       the rows of the folders into the results
python benchmarks/leaderboard.py show                           the tables, as Markdown
"""

import dataclasses
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import typer

from headrace import zoo
from headrace.comparison import leaderboard, rows
from headrace.comparison.choose import state_numbers
from headrace.comparison.defaults import SUITES
from headrace.comparison.plan import MATCHED
from headrace.report import catalog
from headrace.report.page import Section
from record import RESULTS, markdown

KEPT, SUITE = RESULTS / "leaderboard.csv", "small"
SIZED = "gated-deltanet"  # whose state the mixers of the second table have
FAR = f"at {leaderboard.LONGER} times this length"
SOLVES = f"The mixers whose median over the seeds is {leaderboard.SOLVED:.0%} or more."
THEORY = (
    "State tracking in one layer: a matrix with a negative eigenvalue keeps parity ([arXiv 2411.12537]"
    "(https://arxiv.org/abs/2411.12537)), and a permutation that is no swap takes a product of several reflections "
    "([arXiv 2502.10297](https://arxiv.org/abs/2502.10297)). The medians of mixers that should solve a task "
    f"{FAR}, and of mixers that should not."
)
OTHERS = ("transformer", "gla", "mamba", "mamba2", "deltanet", "gated-deltanet")
REFLECTION = ("negative-deltanet", "negative-gated-deltanet", "negative-deltanet(inputs.conv=0)")
PRODUCT = ("deltaproduct", "gated-deltaproduct", "deltaproduct(inputs.conv=0)")
EXPECTED = (  # (task, the mixers that solve it, those that do not)
    ("parity", (*REFLECTION, *PRODUCT), OTHERS),
    ("s3", PRODUCT, (*REFLECTION, *OTHERS)),
    ("s5", PRODUCT, (*REFLECTION, *OTHERS)),
)
app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def keep(folders: list[Path]) -> None:
    """A mixer's rows take the place of those that are kept; the rows of the other mixers stay."""
    kept = rows.read(KEPT) if KEPT.exists() else []
    for folder in folders:
        kept = leaderboard.merged(kept, leaderboard.collect(folder))
    rows.write(kept, KEPT, leaderboard.COLUMNS)


@app.command()
def show() -> None:
    print(*lines(), sep="\n")


def lines() -> list[str]:
    kept = ordered(rows.read(KEPT))
    named, equal = published(kept), [row for row in kept if row["mixer"] in sized(kept)]
    (near, far, _, _), (near_equal, far_equal, _, _), (_, _, rates, sizes) = map(tables, (named, equal, kept))
    about = (
        f"Mixers whose state has as many numbers as that of `{SIZED}`, within {MATCHED - 1:.0%}: as published, or by "
        "`heads.key_dim`. `transformer` has no row, as its cache grows."
    )
    return [
        "### Who solves what", "", SOLVES, "", *markdown(("task", "at the training length", FAR), solved(named)), "",
        "### What theory says", "", THEORY, "",
        *markdown(("task", "should solve", "should not solve", ""), theory(kept)), "",
        "### Equal parameters", "", competing(kept), "", *near, *far,
        "### Equal states", "", about, "", *near_equal, *far_equal,
        *rates, *sizes,
        "### What each mixer is", "", "S_t = A_t S_{t−1} + k_tᵀ b_t; w and r are gates over the heads.", "",
        *markdown(("mixer", "A_t", "b_t", "features"), updates(kept)), "",
        "### The tasks", "", *markdown(("name", "task", "layers", "steps", "rows per step", "rates"), tasks()),
    ]  # fmt: skip


def ordered(kept: list[rows.Row]) -> list[rows.Row]:
    """A mixer's form with a softmax over its heads stands below its backbone."""
    return sorted(kept, key=lambda row: (row["mixer"].removeprefix("softmax-"), row["mixer"]))


def published(kept: list[rows.Row]) -> list[rows.Row]:
    """The rows of mixers whose state has the size of their papers."""
    return [row for row in kept if "heads.key_dim" not in row["mixer"]]


def sized(kept: list[rows.Row]) -> list[str]:
    """The mixers of which a layer's state has as many numbers as that of `SIZED`, within MATCHED."""
    mixers = dict.fromkeys(row["mixer"] for row in kept)
    specs, shape = {mixer: zoo.get(mixer) for mixer in (SIZED, *mixers)}, SUITES[SUITE][0].shape
    numbers = {m: state_numbers(spec, shape) for m, spec in specs.items() if not spec.facts.cached}
    return [m for m in mixers if m in numbers and 1 / MATCHED <= numbers[m] / numbers[SIZED] <= MATCHED]


def tables(kept: list[rows.Row]) -> list[list[str]]:
    """The lines of each section of the leaderboard."""
    return [table(section) for section in leaderboard.sections(kept, SUITE)]


def table(section: Section) -> list[str]:
    about = [line for about in section.about for line in (about, "")]
    return [f"#### {section.title}", "", *about, *markdown(section.header, section.rows), ""]


def updates(kept: list[rows.Row]) -> list[tuple[str, ...]]:
    about = {mixer: catalog.describe(mixer) for mixer in dict.fromkeys(row["mixer"] for row in kept)}
    return [(mixer, *(row[name] for name in ("A_t", "b_t", "features"))) for mixer, row in about.items()]


def medians(kept: list[rows.Row], name: str, times: int) -> dict[str, float]:
    """Mixer -> median score at a multiple of the training length, of the mixers whose runs all ended with one."""
    plan, by_mixer = leaderboard.defined(SUITE)[name], dict[str, list[rows.Row]]()
    for row in kept:
        if row["comparison"] == name:
            by_mixer.setdefault(row["mixer"], []).append(row)
    scores = {mixer: leaderboard.scores(own, plan, times) for mixer, own in by_mixer.items()}
    return {mixer: median(own) for mixer, own in scores.items() if own and None not in own}  # type: ignore[type-var]


def competing(kept: list[rows.Row]) -> str:
    """In how many cells the range of scores of a mixer with a softmax over its heads overlaps that of its backbone."""
    pairs = [(m, f"softmax-{m}") for m in dict.fromkeys(row["mixer"] for row in kept)]
    apart, count = [], 0
    for pair, (name, plan), times in product(pairs, leaderboard.defined(SUITE).items(), (1, leaderboard.LONGER)):
        own, other = (ended(kept, mixer, name, plan, times) for mixer in pair)
        count += bool(own and other)
        if own and other and (max(own) < min(other) or max(other) < min(own)):
            apart.append(f"{name} of {pair[0]} {FAR if times > 1 else 'at the training length'}")
    besides = f", all but {', '.join(apart)}" if apart else ""
    return (
        "The scores of a mixer with a softmax over its heads and those of its backbone have ranges over the seeds that "
        f"overlap in {count - len(apart)} of {count} cells of both lengths{besides}."
    )


def ended(kept: list[rows.Row], mixer: str, name: str, plan: dict[str, Any], times: int) -> list[float]:
    """The scores of a mixer on a task at a multiple of the training length; none if a run diverged."""
    own = [row for row in kept if (row["mixer"], row["comparison"]) == (mixer, name)]
    scores = [score for score in leaderboard.scores(own, plan, times) if score is not None]
    return scores if len(scores) == len(own) else []


def solved(kept: list[rows.Row]) -> list[tuple[str, ...]]:
    """Task -> the mixers that solve it, in most of their seeds."""

    def named(name: str, times: int) -> str:
        reached = medians(kept, name, times)
        return ", ".join(m for m, score in reached.items() if score >= leaderboard.SOLVED) or "none" if reached else "–"

    names = [plan.name for plan in SUITES[SUITE] if plan.task.metric.higher_is_better]
    return [(name, named(name, 1), named(name, leaderboard.LONGER)) for name in names]


def theory(kept: list[rows.Row]) -> list[tuple[str, ...]]:
    told = []
    for name, can, cannot in EXPECTED:
        reached = medians(kept, name, leaderboard.LONGER)
        groups = [{m: reached[m] for m in group if m in reached} for group in (can, cannot)]
        solve, fail = ({m: score >= leaderboard.SOLVED for m, score in group.items()} for group in groups)
        verdict = "shown" if all(solve.values()) and not any(fail.values()) else "**not shown by all**"
        verdict = verdict if solve and fail else "rows are missing"
        shown = (", ".join(f"{m} {100 * score:.1f}" for m, score in group.items()) or "–" for group in groups)
        told.append((name, *shown, verdict))
    return told


def tasks() -> list[tuple[str, ...]]:
    about = []
    for plan in SUITES[SUITE]:
        fields = ", ".join(f"{f.name}={getattr(plan.task, f.name)}" for f in dataclasses.fields(plan.task))
        rates = ", ".join(f"{value:g}" for value in plan.tuning.values)
        sizes = (plan.shape.layers, plan.recipe.steps, plan.recipe.batch_size)
        about.append((plan.name, f"`{plan.task.name}({fields})`", *map(str, sizes), rates))
    return about


if __name__ == "__main__":
    app()
