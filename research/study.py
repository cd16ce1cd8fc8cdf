"""The studies of research/studies: their tables from the rows that are kept in research/results/studies.

headrace compare --plan research/studies/NAME.yaml --output runs/NAME   the runs; the same command continues
python -m research.study keep NAME                                      runs/NAME/runs.csv into the results
python -m research.study show NAME [NAME ...]                           the plans' statistics, as Markdown
python -m research.study pool ARM ARM NAME [NAME ...] [--where PLACE]   their difference over all runs of the plans
python -m research.study draw NAME [NAME ...]                           the pairs each run holds: docs/capacity.png
python -m research.study effects NAME [NAME ...]                        gains of gates and competition, in one table
python -m research.study forest NAME [NAME ...]                         the same as a picture: docs/effects.png
python -m research.study others NAME [NAME ...]                         the same of studies of steps or of losses
python -m research.study published NAME [NAME ...]                      the published form, also without read gate
python -m research.study starts NAME                                    a sweep: each value's arms, less the first's
"""

import math
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import typer
from matplotlib.figure import Figure

from benchmarks.record import markdown
from headrace.comparison import hypotheses, rows
from headrace.comparison.choose import planned
from headrace.comparison.plan import Question, Study
from headrace.report import stats
from headrace.report.differences import Unit
from headrace.report.numbers import count
from headrace.report.page import PALETTE, STYLE
from headrace.utils.errors import InputError

from . import RESULTS

HERE = Path(__file__).parent
DOCS = HERE / "docs"
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
    mean, p = pooled(a, b, names, where)
    print(f"{a} − {b}: {cell(mean, 3)}, {count(mean.n, 'seed')}, p {p:.2g}")


def pooled(a: str, b: str, names: list[str], where: str | None = None) -> tuple[stats.Mean, float]:
    """The difference and its p. That of a seed is the mean over the studies that have it, as its runs read the same
    rows and are not independent."""
    arms = (by_arm(name)[where] if where else only(by_arm(name)) for name in names)
    gains = pd.concat([own[a] - own[b] for own in arms]).dropna().groupby("seed").mean().tolist()
    return stats.mean_over_seeds(gains), stats.paired(gains)


def by_arm(name: str) -> dict[str, pd.DataFrame]:
    """For each place of a study in which no run diverged, the values of every arm [seed, arm]."""
    question, runs = read(name)
    values = hypotheses.values(finished(name, runs), question.measure)
    places = values.assign(arm=values["mixer"].map(question.name)).groupby("place", sort=False)
    return {str(place): own.pivot(index="seed", columns="arm", values="value") for place, own in places}


def only(places: dict[str, pd.DataFrame]) -> pd.DataFrame:
    (own,) = places.values()
    return own


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
            for arm, held in only(by_arm(name)).items():
                at, colour, pairs = ARMS.index(arm), PALETTE[ARMS.index(arm)], 2**held / positions(name)
                ax.plot(pairs, [at] * len(pairs), "o", color=colour, alpha=0.4, ms=5, mec="none")
                ax.plot(2 ** held.mean() / positions(name), at, "D", color=colour, ms=6)
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
    arms: pd.DataFrame  # [seed, COMPARED]
    positions: int  # of a row, for each pair
    converged: str

    def held(self, arm: str) -> str:
        return f"{2 ** self.arms[arm].mean() / self.positions:.0f}"


def settings(names: list[str]) -> list[Setting]:
    """Every setting of the studies; a mixer's name is that of its setting, if the study has several, and of its arm."""
    return [
        setting(name, arm.removesuffix("none"))
        for name in names
        for _, arm in read(name)[0].names
        if arm.endswith("none")
    ]


def setting(name: str, prefix: str) -> Setting:
    """The setting whose arms' names begin with the prefix."""
    arms, title = only(by_arm(name)), TITLES.get(name, name.removeprefix("capacity-")).format(prefix.strip())
    own = arms[[prefix + arm for arm in COMPARED]].set_axis(list(COMPARED), axis=1)
    return Setting(title, own, positions(name), converged(name, [prefix + arm for arm in COMPARED]))


def converged(name: str, arms: Collection[str] | None = None) -> str:
    """How many reported runs of a study, or of some of its arms, have converged."""
    question, runs = read(name)
    last = [
        row["converged"] for row in runs if not row["trial"] and (arms is None or question.name(row["mixer"]) in arms)
    ]
    return f"{sum(last)} of {len(last)}"


def effect(arms: pd.DataFrame, a: str, b: str) -> stats.Mean:
    return stats.mean_over_seeds((arms[a] - arms[b]).tolist())


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
    """A row for each place of each study, and how many of the study's runs have converged."""
    rows = []
    for name in names:
        measure = read(name)[0].measure
        digits = hypotheses.UNITS[measure].digits
        for where, arms in by_arm(name).items():
            place = ", ".join([name, where.partition(", ")[2] or MEASURED[measure]])
            means = [f"{arms[arm].mean():.{digits}f}" for arm in COMPARED]
            rows.append([place, *means, *cells(arms, digits), converged(name)])
    return table(rows)


def cells(arms: pd.DataFrame, digits: int, pairs: Iterable[tuple[str, str]] = EFFECTS) -> list[str]:
    return [cell(effect(arms, a, b), digits) for a, b in pairs]


def cell(gain: stats.Mean, digits: int) -> str:
    unit = Unit("", "", digits)
    return f"{unit.show(gain.value)} ({unit.interval(gain)})"


def table(rows: Iterable[list[str]]) -> list[str]:
    return markdown(["setting", *COMPARED, *(f"{a} − {b}" for a, b in EFFECTS), "converged"], rows)


# --- the published form ----------------------------------------------------------------------------------------------
FORMS = ("none", "published", "published without read gate", "softmax")
OF_FORMS = (("published", "published without read gate"), ("published", "none"), ("published", "softmax"))


@app.command()
def published(names: list[str]) -> None:
    print(*published_of(names), sep="\n")


def published_of(names: list[str]) -> list[str]:
    """A row for each backbone: the pairs that each form holds, and their differences."""
    lines = []
    for name in names:
        arms = only(by_arm(name))
        held = [f"{2 ** arms[form].mean() / positions(name):.0f}" for form in FORMS]
        lines.append([name.removeprefix("published-"), *held, *cells(arms, 2, OF_FORMS), converged(name)])
    return markdown(["backbone", *FORMS, *(f"{a} − {b}" for a, b in OF_FORMS), "converged"], lines)


@app.command()
def starts(name: str) -> None:
    print(*starts_of(name), sep="\n")


def starts_of(name: str) -> list[str]:
    """A row for each value of a study's sweep: the pairs that each arm holds, and the difference to the first value."""
    (first, *_), sweep = by_arm(name).values(), plan(name).sweep
    assert sweep is not None
    rows: list[list[str]] = []
    for value, own in zip(sweep["values"], by_arm(name).values(), strict=True):
        held = [f"{2 ** own[arm].mean() / positions(name):.0f}" for arm in own]
        gains = [cell(stats.mean_over_seeds((own[arm] - first[arm]).tolist()), 2) for arm in own]
        rows.append([str(value), *held, *(gains if rows else ["–"] * len(gains))])
    return markdown([sweep["field"], *first, *(f"{arm}: less {sweep['values'][0]}" for arm in first)], rows)


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
            gains = [effect(setting.arms, a, b) for setting in shown]
            reaches = [gain.reach if math.isfinite(gain.reach) else math.nan for gain in gains]
            ax.errorbar([gain.value for gain in gains], range(len(shown)), xerr=reaches, fmt="o", color=colour, ms=4)
            ax.axvline(0, color="0.5", lw=0.8)
            ax.set(title=f"{a} − {b}", xlabel="doublings of the pairs held")
        panels[0].set_yticks(range(len(shown)), [setting.name for setting in shown])
    return figure


def lines(names: list[str]) -> list[str]:
    return shown({name: read(name) for name in names})


def shown(studies: dict[str, tuple[Question, list[rows.Row]]]) -> list[str]:
    """The answers and tables of studies as Markdown; each by its name, with its question and its runs."""
    text, asked = [], list(studies.values())
    for name, (question, runs), tests in zip(studies, asked, hypotheses.differences(asked), strict=True):
        text += [f"### {name}", ""] if len(studies) > 1 else []
        text += [hypotheses.answer(question, tests), ""]
        for section in hypotheses.sections(question, runs, tests):
            text += [line for about in section.about for line in (about, "")]
            text += [*markdown(section.header, section.rows), ""]
        last = [row for row in runs if not row["trial"]]
        text += [f"{sum(row['converged'] for row in last)} of {len(last)} reported runs converged.", ""]
        if lost := sum(row["score"] is None for row in last):
            text += [f"{count(lost, 'run')} diverged, and the tables are without {'it' if lost == 1 else 'them'}.", ""]
    return text


def plan(name: str) -> Study:
    return planned(HERE / "studies" / f"{name}.yaml")


def positions(name: str) -> int:
    """The positions of a row for each pair that it stores."""
    task: Any = plan(import_module(f"research.{name}").BASE if name in PROGRAMS else name).plans[0].task
    return task.length // task.pairs


def question(name: str) -> Question:
    asked = plan(name).question
    assert asked is not None
    return asked


def read(name: str) -> tuple[Question, list[rows.Row]]:
    """The question of a study and its rows. PROGRAMS have a question that no plan can state."""
    return (import_module(f"research.{name}").question() if name in PROGRAMS else question(name)), rows.read(kept(name))


if __name__ == "__main__":
    app()
