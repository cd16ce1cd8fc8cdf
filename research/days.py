"""The days of GPUs that the papers' scale takes: what `headrace train --dry-run --machine` says of every run.

python -m research.days keep      estimates every run anew, in minutes, into results/days.csv
python -m research.days show      their sums by table and figure, as Markdown
"""

from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from benchmarks import record
from headrace import zoo
from headrace.training import machine, recipes

from . import RESULTS
from .reproduce.experiment import commands, load

KEPT = RESULTS / "days.csv"
# Experiments in the order of their runs, and the machine; table 4 has the models of tables 2 and 3 and of figure 4.
MACHINES = {"table-4": "8xH100", "figure-1": "8xH100", "figure-2": "8xH100", "first-test": "1xH100"}
TITLES = {
    "table-4": "tables 2 to 4 and figure 4", "figure-1": "figure 1, what is left", "figure-2": "figure 2, what is left",
    "first-test": "the first test: figure 2's ends on a tenth of the tokens",
}  # fmt: skip
app = typer.Typer(add_completion=False, help=__doc__)


def trained(name: str) -> list[tuple[str, str, str]]:
    """The recipe, its settings and the mixer of every run of an experiment at the paper's scale."""
    runs = []
    for _, _, recipe, *words in (step for step in commands(load(name).at("paper"), Path("root")) if step[1] == "train"):
        at = words.index("--mixer")
        runs.append((recipe, " ".join(words[:at]), words[at + 1]))
    return runs


@app.command()
def keep() -> None:
    """Estimates the runs; one that an earlier experiment has is left out."""
    rows, seen = [], set[tuple[str, str, str]]()
    for name, on in MACHINES.items():
        for run in (run for run in trained(name) if run not in seen):
            seen.add(run)
            recipe, settings, mixer = run
            reached = machine.efficiency(mixer).fraction
            days = planned(recipe, settings, backbone(mixer), on)["days"] / reached
            about = {"experiment": name, "machine": on, "recipe": recipe, "settings": settings, "mixer": mixer}
            rows.append(about | {"efficiency": reached, "days": days})
    KEPT.unlink(missing_ok=True)
    record.append(KEPT, {}, rows)


@cache
def planned(recipe: str, settings: str, mixer: str, on: str) -> dict[str, Any]:
    """The plan of a run that reaches the peak of the machine."""
    changes = dict(setting.split("=", 1) for setting in settings.split()) | {"mixer": mixer}
    return machine.plan(recipes.load(recipe, changes)[0], machine.parse(on), assumed=1)


def backbone(mixer: str) -> str:
    """The mixer without gates over heads, which are no matrix product: it has as many FLOPs. The mixer itself if its
    backbone has no name."""
    plain = zoo.plain(zoo.get(mixer))
    return next((name for name in zoo.names() if zoo.get(name) == plain), mixer)


@app.command()
def show() -> None:
    print(*lines(), sep="\n")


def lines() -> list[str]:
    """A row for each experiment: its runs, and the days of one GPU for all of them."""
    rows = []
    for name, own in groupby(record.read(KEPT), lambda row: row["experiment"]):
        runs = list(own)
        devices = machine.parse(runs[0]["machine"]).devices
        days = devices * sum(float(row["days"]) for row in runs)
        rows.append([TITLES[name], str(len(runs)), runs[0]["machine"], f"{days:.1f}"])
    return record.markdown(["what", "runs", "machine", "GPU days"], rows, ["---", "--:", "---", "--:"])


if __name__ == "__main__":
    app()
