"""The studies and rows of a suite: what each mixer reached on each task, from its own study alone.

Rows of two folders stand side by side if their `definition` is the same, a digest of all that the scores depend on but
the mixer: task, shape, recipe, search and seeds. A table has a cell for each mixer and task, and never a mean over
tasks, which would say how much of one task is worth how much of another.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ..files.results import file_names, read_result
from ..report.page import Page, Section
from ..tasks import TASKS, Metric
from ..utils.errors import InputError, reading, require
from ..utils.integrity import digest
from . import rows as runs
from .defaults import REFERENCE, SUITES
from .plan import Study, spelt
from .summary import FLOAT, show, task_of
from .tuning import at_edge

SOLVED = 0.95  # accuracy from which on a seed has solved its task
BITS = 8.0  # of a byte
LONGER = 4  # times the training length of the second table
MADE = ("headrace", "source", "torch", "python", "processor")  # of the environment
COLUMNS = (*runs.COLUMNS, "definition", *MADE, "plugins")
ABOUT = (
    "A cell is the median over the seeds, from the lowest to the highest seed, and how many seeds have an accuracy of "
    f"{SOLVED:.0%} or more. Of five seeds, the lowest to the highest holds the median of all seeds with a probability "
    "of 94 %, however they are distributed; whether a model learns to track a state is nearly all or nothing."
)
EDGE = "* is at the edge of those tried."
SIZES = (
    "Smallest and largest over the tasks. Minutes are those of all runs of a row, the search among them, one after "
    "another on one core."
)
FORM: Any = {"study": {"plans": [dict]}, "environments": [dict], "arms": [dict], "trials": [dict]}

Row = runs.Row


def of_mixer(suite: str, mixer: str) -> Study:
    """The study of a mixer's row."""
    return Study(suite, f"The suite {suite}: {mixer}", tuple(replace(plan, mixers=(mixer,)) for plan in SUITES[suite]))


def studies(suite: str, mixers: Sequence[str]) -> dict[str, Study]:
    """The name of a mixer's folder -> the study of its row. InputError for an unknown suite."""
    require(suite in SUITES, f"--suite {suite!r}; expected one of {', '.join(SUITES)}")
    names = file_names(mixers, spelt)
    return {names[mixer]: of_mixer(suite, mixer) for mixer in mixers}


def others(file: Path | None) -> list[Row]:
    """The rows of a file; None: those of the checkout that this package runs from, or no rows without a checkout.

    Raises:
        InputError: the file does not exist, or has no rows of a leaderboard.
    """
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / "leaderboard.csv"
    if file is None and not kept.is_file():
        return []
    with reading(f"--board {str(file or kept)!r} is no file of the leaderboard's rows"):
        rows = runs.read(file or kept)
        if missing := next((name for name in COLUMNS if name not in rows[0]), None):
            raise ValueError(f"it has no column {missing!r}")
    return [{name: row[name] for name in COLUMNS} for row in rows]


def definition(plan: dict[str, Any]) -> str:
    """12 digits of a digest of a plan's JSON without its mixers, and without whether blocks are compiled."""
    recipe = {name: value for name, value in plan["recipe"].items() if name != "compile"}
    kept = {name: value for name, value in plan.items() if name not in ("mixers", "widths", "specs")}
    return digest(kept | {"recipe": recipe})[:12]


def definitions(plans: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Name of a plan or of one of its trials -> the plan's definition."""
    return {name: definition(p) for p in plans for name in (p["name"], *(trial["name"] for trial in p["trials"]))}


def defined(suite: str) -> dict[str, dict[str, Any]]:
    """Name of a task of a suite -> its plan's JSON today."""
    return {plan["name"]: plan for plan in of_mixer(suite, REFERENCE).to_json()["plans"]}


def collect(folder: Path) -> list[Row]:
    """The rows of all finished studies in a folder, one folder in it for each mixer."""
    files = sorted(folder.glob("*/results.json"))
    return [row for file in files for row in of_results(read_result(file, FORM))]


def of_results(results: dict[str, Any]) -> list[Row]:
    names = definitions(results["study"]["plans"])
    environments, rows = results["environments"], []
    places = {environment["commit"]: place for place, environment in enumerate(environments)}  # of older results
    for row, arm in zip(runs.rows(results), [*results["trials"], *results["arms"]], strict=True):
        own = environments[arm.get("environment", places[row["commit"]])]
        plugins = ", ".join(f"{name} {value}" for name, value in own.items() if name.startswith("plugin "))
        row |= {"definition": names[row["comparison"]], "plugins": plugins}
        rows.append(row | {name: own[name] for name in MADE})
    return rows


def merged(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """The old rows without those of the mixers of the new ones, and the new rows, by name of mixer.

    Raises:
        InputError: two rows of a task have different definitions.
    """
    mixers = {row["mixer"] for row in new}
    rows = sorted([*(row for row in old if row["mixer"] not in mixers), *new], key=lambda row: row["mixer"])
    first: dict[str, Row] = {}
    for row in rows:
        known = first.setdefault(row["comparison"], row)
        if known["definition"] != row["definition"]:
            raise InputError(
                f"the rows of {known['mixer']} and {row['mixer']} have different definitions of {row['comparison']!r} "
                f"({known['definition']} and {row['definition']}); expected rows of one suite"
            )
    return rows


def comparable(rows: Iterable[Row], suite: str) -> tuple[list[Row], list[str]]:
    """(the rows whose definition is today's, the names of the plans whose other rows are left out)."""
    today = definitions(defined(suite).values())
    kept, left = [], dict[str, None]()
    for row in rows:
        if today.get(row["comparison"]) == row["definition"]:
            kept.append(row)
        elif not row["trial"]:
            left[row["comparison"]] = None
    return kept, list(left)


# --- tables ----------------------------------------------------------------------------------------------------------
def sections(rows: Sequence[Row], suite: str) -> list[Section]:
    """The tables: scores at the training length and at LONGER times this length, learning rates, sizes and time."""
    plans, mixers = defined(suite), list(dict.fromkeys(row["mixer"] for row in rows))
    of = {(m, name): [r for r in rows if (r["mixer"], r["comparison"]) == (m, name)] for m in mixers for name in plans}
    metrics = {name: metric_of(plan) for name, plan in plans.items()}
    far = [name for name in plans if any(scores(of[m, name], plans[name], LONGER) for m in mixers)]
    near_rows = [[m, *(cell(scores(of[m, n], plans[n]), metrics[n]) for n in plans)] for m in mixers]
    far_rows = [[m, *(cell(scores(of[m, n], plans[n], LONGER), metrics[n]) for n in far)] for m in mixers]
    guesses = ["guessing", *(bare(metrics[name], chance(plan)) for name, plan in plans.items())]
    units = ", ".join(f"{name} is {metric.name}" for name, metric in metrics.items() if not metric.unit)
    near = (ABOUT, f"Accuracy in %; {units}.")
    taken = [[m, *(rates(of[m, n], plans[n]) for n in plans)] for m in mixers]
    sized = [[m, *sizes([row for row in rows if row["mixer"] == m])] for m in mixers]
    return [
        Section("At the training length", near, header=("mixer", *plans), rows=[guesses, *near_rows]),
        Section(f"At {LONGER} times the training length", header=("mixer", *far), rows=far_rows),
        Section("Learning rates taken", (EDGE,), header=("mixer", *plans), rows=taken),
        Section("Sizes and time", (SIZES,), header=("mixer", "parameters", "state, numbers", "minutes"), rows=sized),
    ]


def metric_of(plan: dict[str, Any]) -> Metric:
    """The metric that a suite reports: bits per byte of a text, else that of the task."""
    metric = TASKS[plan["task"]["name"]].metric
    return Metric("bits per byte", "", digits=2, higher_is_better=False) if metric.name == "loss" else metric


def scores(rows: Iterable[Row], plan: dict[str, Any], times: int = 1) -> list[float | None]:
    """The score of each row at a multiple of the training length, None for a run that diverged; empty for a task that
    is not evaluated there."""
    if times == 1:
        return [row["scores"].get(metric_of(plan).name) for row in rows]
    lengths = [row["by_length"] for row in rows]
    return [own.get(times * plan["length"]) for own in lengths] if any(lengths) else []


def cell(scores: Sequence[float | None], metric: Metric) -> str:
    """Median, lowest to highest, and seeds that solve the task."""
    known = [score for score in scores if score is not None and math.isfinite(score)]
    lost = f" ({len(scores) - len(known)} diverged)" if len(known) < len(scores) else ""
    if not known:
        return lost.strip() or "–"
    middle, low, high = (bare(metric, score) for score in (median(known), min(known), max(known)))
    solved = f" {sum(score >= SOLVED for score in known)}/{len(scores)}" if metric.higher_is_better else ""
    return f"{middle} ({low}–{high}){solved}{lost}"


def bare(metric: Metric, score: float) -> str:
    """The score without its unit."""
    return show(metric, score).removesuffix(metric.unit).strip()


def chance(plan: dict[str, Any]) -> float:
    """The score of uniform guesses."""
    return getattr(task_of(plan["task"]), "chance", BITS)


def rates(rows: Sequence[Row], plan: dict[str, Any]) -> str:
    tried = plan["tuning"]["values"]
    return ", ".join(f"{lr:g}{'*' * at_edge(tried, lr)}" for lr in dict.fromkeys(row["lr"] for row in rows)) or "–"


def sizes(rows: Sequence[Row]) -> list[str]:
    """Least and greatest numbers of parameters and of the state over the tasks, and the minutes of all runs."""
    values = [sorted({row[name] // size for row in rows}) for name, size in (("parameters", 1), ("state_bytes", FLOAT))]
    spans = ["–".join(f"{value:,}" for value in dict.fromkeys((own[0], own[-1]))) for own in values]
    return [*spans, f"{sum(row['seconds'] for row in rows) / 60:.0f}"]


def report(folder: Path, suite: str, others: Sequence[Row]) -> Page:
    """Writes leaderboard.csv and leaderboard.html into the folder of a suite's studies: their rows, beside those of
    others, and returns the page."""
    (kept, unlike), (own, old) = (comparable(rows, suite) for rows in (others, collect(folder)))
    rows, left = merged(kept, own), list(dict.fromkeys([*unlike, *old]))
    runs.write(rows, folder / "leaderboard.csv", COLUMNS)
    about = [] if others else ["There are no rows of others: --board names a file of them."]
    about += [f"Rows with another definition than this version's are left out: {', '.join(left)}."] if left else []
    page = Page(f"Leaderboard: the suite {suite}", about, sections(rows, suite))
    page.write(folder / "leaderboard.html")
    return page
