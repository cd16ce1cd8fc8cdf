"""The rows of the leaderboard, benchmarks/results/leaderboard.csv.

headrace compare --suite small --mixers NAME --output FOLDER    the row of a mixer; the same command continues
python benchmarks/leaderboard.py keep FOLDER [FOLDER ...]       the rows of the folders into the results
python benchmarks/leaderboard.py show                           the tables, as Markdown
"""

import dataclasses
from pathlib import Path
from statistics import median

import typer

from headrace.comparison import leaderboard, rows
from headrace.comparison.defaults import SUITES
from record import RESULTS, markdown

KEPT, SUITE = RESULTS / "leaderboard.csv", "small"
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
    kept = rows.read(KEPT)
    text = ["### Who solves what", "", SOLVES, "", *markdown(("task", "at the training length", FAR), solved(kept)), ""]
    text += [
        "### What theory says",
        "",
        THEORY,
        "",
        *markdown(("task", "should solve", "should not solve", ""), theory(kept)),
        "",
    ]
    for section in leaderboard.sections(kept, SUITE):
        text += [f"### {section.title}", "", *(line for about in section.about for line in (about, ""))]
        text += [*markdown(section.header, section.rows), ""]
    return [
        *text,
        "### The tasks",
        "",
        *markdown(("name", "task", "layers", "steps", "rows per step", "rates"), tasks()),
    ]


def medians(kept: list[rows.Row], name: str, times: int) -> dict[str, float]:
    """Mixer -> median score at a multiple of the training length, of the mixers whose runs all ended with one."""
    plan, by_mixer = leaderboard.defined(SUITE)[name], dict[str, list[rows.Row]]()
    for row in kept:
        if row["comparison"] == name:
            by_mixer.setdefault(row["mixer"], []).append(row)
    scores = {mixer: leaderboard.scores(own, plan, times) for mixer, own in by_mixer.items()}
    return {mixer: median(own) for mixer, own in scores.items() if own and None not in own}  # type: ignore[type-var]


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
