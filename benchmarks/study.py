"""The studies of benchmarks/studies: their tables from the rows that are kept in benchmarks/results/studies.

headrace compare --plan benchmarks/studies/NAME.yaml --output runs/NAME     the runs; the same command continues
python benchmarks/study.py keep NAME                                        runs/NAME/runs.csv into the results
python benchmarks/study.py show NAME [NAME ...]                             the plans' statistics, as Markdown
python benchmarks/study.py pool ARM ARM NAME [NAME ...] [--where PLACE]     their difference over all runs of the plans
python benchmarks/study.py draw NAME [NAME ...]                             the pairs each run holds: docs/capacity.png
python benchmarks/study.py effects NAME [NAME ...]                          gains of gates and competition, in one table
python benchmarks/study.py forest NAME [NAME ...]                           the same as a picture: docs/effects.png
python benchmarks/study.py others NAME [NAME ...]                           the same of studies of steps or of losses
"""

import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean

import matplotlib
import typer
from matplotlib.figure import Figure

from headrace.studies.compare import rows, statistics
from headrace.studies.compare.choose import planned
from headrace.studies.compare.plan import Study
from headrace.studies.compare.question import Question
from headrace.studies.report.numbers import count
from headrace.studies.report.style import PALETTE, STYLE
from headrace.utils.errors import InputError
from record import RESULTS, markdown

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PROGRAMS = ("retrofit",)  # modules beside this one
ARMS = ("shuffled", "none", "sigmoid", "wide sigmoid", "softmax", "softmax read")  # from bottom to top
app = typer.Typer(add_completion=False, help=__doc__)


def kept(name: str) -> Path:
    return RESULTS / "studies" / f"{name}.csv"


@app.command()
def keep(name: str, run: Path | None = None) -> None:
    shutil.copy((run or Path("runs", name)) / "runs.csv", kept(name))


@app.command()
def show(names: list[str]) -> None:
    """Prints the statistics of studies, corrected by Holm's rule over the comparisons of all of them."""
    print(*lines(names), sep="\n")


@app.command()
def pool(a: str, b: str, names: list[str], where: str | None = None) -> None:
    """Prints the difference of two arms over all runs of several studies, tested over seeds.

    where: the value to compare, of studies with more than one, such as "text, loss on repeats".
    """
    one = pooled(a, b, names, where)
    print(f"{a} - {b}: {one.mean:+.3f} ({one.low:+.3f} … {one.high:+.3f}), {count(one.n, 'seed')}, p {one.p:.2g}")


def pooled(a: str, b: str, names: list[str], where: str | None = None) -> statistics.Tested:
    """The difference of a seed is the mean over the studies that have it, as its runs read the same rows and are not
    independent."""
    gains: dict[int, list[float]] = {}
    for name in names:
        question, runs = read(name)
        by_place = statistics.collected(finished(name, runs), question.measure)
        (held,) = by_place.values() if where is None else (by_place[where],)
        first, second = (next(held[mixer] for mixer, label in question.names if label == arm) for arm in (a, b))
        for seed in first.keys() & second.keys():
            gains.setdefault(seed, []).append(first[seed] - second[seed])
    return statistics.tested("t", "", a, b, [fmean(own) for own in gains.values()])


def finished(name: str, runs: list[rows.Row]) -> list[rows.Row]:
    """The runs, none of which has diverged, so that all means are over the same seeds."""
    if gone := sum(row["score"] is None for row in runs if not row["trial"]):
        raise InputError(f"{count(gone, 'run')} of the study {name} diverged; expected a study in which all finished")
    return runs


@app.command()
def draw(names: list[str]) -> None:
    picture(names).savefig(DOCS / "capacity.png", dpi=150)


def picture(names: list[str]) -> Figure:
    """A panel for each study of capacity: the pairs that every reported run holds, by arm, and their mean."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.3 * len(names), 2.6), layout="constrained")
        panels = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
        for ax, name in zip(panels, names, strict=True):
            question, runs = read(name)
            (held,) = statistics.collected(runs, question.measure).values()
            for mixer, arm in question.names:
                colour = PALETTE[ARMS.index(arm)]
                pairs = [2**value / positions(name) for value in held[mixer].values()]
                ax.plot(pairs, [ARMS.index(arm)] * len(pairs), "o", color=colour, alpha=0.4, ms=5, mec="none")
                ax.plot(2 ** fmean(map(math.log2, pairs)), ARMS.index(arm), "D", color=colour, ms=6)
            ax.set(title=name.removeprefix("capacity-"), xscale="log", xlabel="pairs held at 90 %")
            ax.set_xticks([4, 8, 16, 32], ["4", "8", "16", "32"])
            ax.minorticks_off()
        panels[0].set_yticks(range(len(ARMS)), ARMS)
    return figure


# --- all settings side by side ---------------------------------------------------------------------------------------
TITLES = {  # of studies whose names do not say it; {} stands for the setting
    "long-retnet": "retnet, 6,000 steps", "retrofit": "retnet, gates added late", "heads-retnet": "retnet, MLP, {}",
    "clusters": "{}, keys in clusters", "capacity-small": "{}, a quarter of the state",
    "capacity-large": "retnet, four times the state", "overwritten": "{}, values overwritten",
    "distractors": "retnet, among distractors", "distractors-rates": "retnet, among distractors, new seeds",
    "capacity-large-rates": "retnet, four times the state, new seeds", "heads-norm": "retnet, MLP, {}, without norm",
    "heads-32": "retnet, MLP, 32 heads of 4 × 4",
}  # fmt: skip
COMPARED = ("none", "wide sigmoid", "softmax")
MEASURED = {"speed": "steps to 90 %"}
EFFECTS = (("softmax", "none"), ("wide sigmoid", "none"), ("softmax", "wide sigmoid"))


@dataclass(frozen=True)
class Setting:
    """A backbone in a study of capacity: the values of COMPARED by seed, and how many of these runs have converged."""

    name: str
    arms: dict[str, dict[int, float]]
    positions: int  # of a row, for each pair
    converged: str

    def effect(self, a: str, b: str) -> statistics.Tested:
        return statistics.compared("t", "", a, b, self.arms)

    def held(self, arm: str) -> str:
        return f"{2 ** fmean(self.arms[arm].values()) / self.positions:.0f}"


def settings(names: list[str]) -> list[Setting]:
    """Every setting of the studies; a mixer's name is that of its setting, if the study has several, and of its arm."""
    listed = []
    for name in names:
        question, runs = read(name)
        (held,) = statistics.collected(finished(name, runs), question.measure).values()
        for mixer, called in question.names:
            if called.endswith("none"):
                prefix = called.removesuffix("none")
                own = {arm: mixer for mixer, label in question.names for arm in COMPARED if label == prefix + arm}
                last = [row for row in runs if not row["trial"] and row["mixer"] in own.values()]
                settled = f"{sum(row['converged'] for row in last)} of {len(last)}"
                arms = {arm: held[mixer] for arm, mixer in own.items()}
                title = TITLES.get(name, name.removeprefix("capacity-")).format(prefix.strip())
                listed.append(Setting(title, arms, positions(name), settled))
    return listed


@app.command()
def effects(names: list[str]) -> None:
    print(*effects_of(names), sep="\n")


def effects_of(names: list[str]) -> list[str]:
    return table(
        [setting.name, *map(setting.held, COMPARED), *cells(setting.arms, 2), setting.converged]
        for setting in settings(names)
    )


@app.command()
def others(names: list[str]) -> None:
    print(*others_of(names), sep="\n")


def others_of(names: list[str]) -> list[str]:
    """A row for each place of each study, and the runs of it that have converged."""
    lines = []
    for name in names:
        question, runs = read(name)
        last, digits = [row for row in runs if not row["trial"]], statistics.DIGITS[question.measure]
        settled = f"{sum(row['converged'] for row in last)} of {len(last)}"
        for where, held in statistics.collected(finished(name, runs), question.measure).items():
            arms = {called: held[mixer] for mixer, called in question.names}
            place = ", ".join([name, where.partition(", ")[2] or MEASURED[question.measure]])
            means = [f"{fmean(arms[arm].values()):.{digits}f}" for arm in COMPARED]
            lines.append([place, *means, *cells(arms, digits), settled])
    return table(lines)


def cells(arms: dict[str, dict[int, float]], digits: int) -> list[str]:
    tested = (statistics.compared("t", "", a, b, arms) for a, b in EFFECTS)
    return [f"{one.mean:+.{digits}f} ({one.interval(digits)})".replace("-", "−") for one in tested]


def table(lines: Iterable[list[str]]) -> list[str]:
    return markdown(["setting", *COMPARED, *(f"{a} − {b}" for a, b in EFFECTS), "converged"], lines)


@app.command()
def forest(names: list[str]) -> None:
    effects_picture(names).savefig(DOCS / "effects.png", dpi=150)


def effects_picture(names: list[str]) -> Figure:
    """A panel for each effect, with its mean and 95 % interval in every setting."""
    shown = settings(names)[::-1]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.28 * len(shown) + 1), layout="constrained")
        panels = figure.subplots(1, len(EFFECTS), sharex=True, sharey=True)
        for ax, (a, b), colour in zip(panels, EFFECTS, PALETTE, strict=False):
            tested = [setting.effect(a, b) for setting in shown]
            halves = [one.high - one.mean if math.isfinite(one.high) else math.nan for one in tested]
            ax.errorbar([one.mean for one in tested], range(len(shown)), xerr=halves, fmt="o", color=colour, ms=4)
            ax.axvline(0, color="0.5", lw=0.8)
            ax.set(title=f"{a} − {b}", xlabel="doublings of the pairs held")
        panels[0].set_yticks(range(len(shown)), [setting.name for setting in shown])
    return figure


def lines(names: list[str]) -> list[str]:
    return shown({name: read(name) for name in names})


def shown(studies: dict[str, tuple[Question, list[rows.Row]]]) -> list[str]:
    """The answers and tables of studies as Markdown; each by its name, with its question and its runs."""
    shown, questions = [], list(studies.values())
    for name, (question, runs), tested in zip(studies, questions, statistics.differences(questions), strict=True):
        shown += [f"### {name}", ""] if len(studies) > 1 else []
        for table in statistics.tables(question, runs, tested):
            shown += [table.answer, "", table.about, ""] if table.answer else []
            shown += markdown(table.header, table.rows)
            shown.append("")
        last = [row for row in runs if not row["trial"]]
        shown += [f"{sum(row['converged'] for row in last)} of {len(last)} reported runs converged.", ""]
        if lost := sum(row["score"] is None for row in last):
            shown += [f"{count(lost, 'run')} diverged, and the tables are without {'it' if lost == 1 else 'them'}.", ""]
    return shown


def plan(name: str) -> Study:
    return planned(HERE / "studies" / f"{name}.yaml")


def positions(name: str) -> int:
    """The positions of a row for each pair that it stores."""
    task = plan(import_module(name).BASE if name in PROGRAMS else name).plans[0].task
    return task.length // task.pairs


def question(name: str) -> Question:
    asked = plan(name).question
    assert asked is not None
    return asked


def read(name: str) -> tuple[Question, list[rows.Row]]:
    """The question of a study and its rows. PROGRAMS have a question that no plan can state."""
    return (import_module(name).question() if name in PROGRAMS else question(name)), rows.read(kept(name))


if __name__ == "__main__":
    app()
