"""A table or a figure of a paper, from its YAML file: the steps at each scale, and what was published.

A file says for each scale its `axes` (mixers, seeds, …), the name of a `run` made of them, and `steps`: commands, each
repeated over the axes that it names. `columns` say where a number of ours is read, `rows` where it belongs.

    {text}          what was given by --text         {root}  the folder of --output
    {run}           the folder of one training run   {runs}  of all of them   {models}  what they trained
    {mixer} …       a value of an axis
"""

import difflib
import itertools
import re
import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError

FOLDER = Path(__file__).parent / "experiments"
SCALES = ("paper", "laptop")
AXIS = re.compile(r"{(\w+)}")


@dataclass(frozen=True)
class Scale:
    steps: list[str]
    text: list[str]  # what is prepared where --text names nothing
    axes: dict[str, list[Any]] = field(default_factory=dict)
    run: str = ""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One model, or one less another (`minus`: what differs in the other). published: a number per column, or None."""

    name: str
    at: dict[str, Any]
    published: list[float | None] | None = None
    minus: dict[str, Any] | None = None


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    source: str
    scales: dict[str, Scale]
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the paper leaves open, and where it contradicts itself


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "common")


@cache
def load(name: str) -> Experiment:
    """The experiment of a name. Raises InputError for one that does not exist."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), 3) or names()
        raise InputError(f"{name!r} is not known; the nearest are {', '.join(near)}")
    given, common = (read(FOLDER / f"{file}.yaml") for file in (name, "common"))
    scales = {}
    for scale in SCALES:
        own = common["scales"][scale] | given.pop(scale)
        own["steps"] = [step for part in own["steps"] for step in common["steps"].get(part, [part])]
        scales[scale] = Scale(**own)
    rows = [Row(**row) for row in given.pop("rows", [])]
    return Experiment(name=name, scales=scales, rows=rows, **given)


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def combinations(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def run_folder(scale: Scale, root: Path, at: dict[str, Any]) -> Path:
    return root / re.sub(r"[^\w.@-]+", "_", scale.run.format(**at)).strip("_")


def commands(scale: Scale, root: Path, text: list[str]) -> list[list[str]]:
    """Every command of a scale, in order, as arguments."""
    runs = [str(run_folder(scale, root, at)) for at in combinations(scale.axes)] if scale.run else []
    lists = {"{text}": text or scale.text, "{runs}": runs, "{models}": [f"{run}/model" for run in runs]}
    found = []
    for step in scale.steps:
        named = scale.axes if "{run}" in step else {n: scale.axes[n] for n in AXIS.findall(step) if n in scale.axes}
        for at in combinations(named):
            values = at | {"root": root} | ({"run": run_folder(scale, root, at)} if "{run}" in step else {})
            found.append([part for word in shlex.split(step) for part in lists.get(word) or [word.format(**values)]])
    return found
