"""A table or figure of a paper as a YAML file: the steps of its reproduction at each scale, and the published numbers.

For each scale the file has `axes` (mixers, seeds, …), the name of a `run` as a template of axis values, and `steps`:
commands, each repeated over the axes that it mentions. `columns` say where reproduced numbers are read, `rows` to which
models they belong; `place` says where the published ones were read. Commands can contain

    {text}      the training text                {root}    the folder of --root
    {run}       the folder of a training run     {runs}    the folders of all runs   {models}  their trained models
    {mixer} …   a value of an axis               {mixers}  all mixers, separated by commas
    {settings}  the scale's settings for a mixer's recipe, see `Scale.settings`
"""

import difflib
import itertools
import re
import shlex
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from headrace import zoo
from headrace.training import recipes
from headrace.utils.errors import InputError

FOLDER = Path(__file__).parent / "experiments"
SCALES = ("paper", "laptop")
AXIS = re.compile(r"{(\w+)}")


@dataclass(frozen=True)
class Scale:
    steps: list[str]
    text: list[str]  # training text if --text is not given
    axes: dict[str, list[Any]] = field(default_factory=dict)
    run: str = ""
    note: dict[str, str] = field(default_factory=dict)  # {command, or text: sentence on it}
    comparable: bool = True  # whether its models are the paper's, so that a number can be compared with the published
    settings: dict[str, str] = field(default_factory=dict)  # {mixer without competition: more settings of its recipe}


@dataclass(frozen=True)
class Row:
    """One model, or the difference of two.

    at: the model's values of the axes. minus: the axis values of the subtracted model that differ from `at`. published:
    the published number for each column, None if there is none. place: where these numbers stand, if it is not where
    the experiment says."""

    name: str
    at: dict[str, Any]
    published: list[float | None] | None = None
    place: str = ""
    minus: dict[str, Any] | None = None


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    source: str
    scales: dict[str, Scale]
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    place: str = ""  # where the published numbers stand
    notes: list[str] = field(default_factory=list)  # open points and contradictions of the paper

    def places(self) -> dict[str, str]:
        """{row with published numbers: where these stand}"""
        return {row.name: row.place or self.place for row in self.rows if row.published is not None}

    def at(self, scale: str) -> Scale:
        if scale not in SCALES:
            raise InputError(f"--scale={scale!r}; expected {' or '.join(SCALES)}")
        return self.scales[scale]


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "common")


@cache
def load(name: str) -> Experiment:
    """The experiment with a name. InputError for an unknown name."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), 3) or names()
        raise InputError(f"experiment {name!r} is unknown; the nearest names are {', '.join(near)}")
    fields, common = (recipes.read_yaml(FOLDER / f"{file}.yaml") for file in (name, "common"))
    scales = {}
    for scale in SCALES:
        own = common["scales"][scale] | fields.pop(scale)
        own["steps"] = [step for part in own["steps"] for step in common["steps"].get(part, [part])]
        scales[scale] = Scale(**own)
    rows = [Row(**row) for row in fields.pop("rows", [])]
    return Experiment(name=name, scales=scales, rows=rows, **fields)


def combinations(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def tailored(scale: Scale, text: list[str], only: list[str]) -> Scale:
    """The scale with another training text, and fewer values of its axes (`only`).

    Raises:
        InputError: no step reads a text, or `only` does not fit the scale.
    """
    if text and not any("{text}" in step for step in scale.steps):
        raise InputError(f"--text {text[0]!r} is not used: no step reads a text; leave --text out")
    chosen = restricted(scale, only)
    return replace(chosen, text=text or scale.text, comparable=scale.comparable and not text)


def run_folder(scale: Scale, root: Path, at: dict[str, Any]) -> Path:
    return root / re.sub(r"[^\w.@-]+", "_", scale.run.format(**at)).strip("_")


def commands(scale: Scale, root: Path) -> list[list[str]]:
    """All commands of a scale in order, each as a list of arguments."""
    runs = [str(run_folder(scale, root, at)) for at in combinations(scale.axes)] if scale.run else []
    lists = {"{text}": scale.text, "{runs}": runs, "{models}": [f"{run}/model" for run in runs]}
    filled = []
    for step in scale.steps:
        named = scale.axes if "{run}" in step else {n: scale.axes[n] for n in AXIS.findall(step) if n in scale.axes}
        for at in combinations(named):
            values = at | {"root": root, "mixers": ",".join(scale.axes.get("mixer", []))}
            values |= {"run": run_folder(scale, root, at)} if "{run}" in step else {}
            words_of = lists | {"{settings}": settings(scale, at)}
            formatted = (words_of[word] if word in words_of else [word.format(**values)] for word in shlex.split(step))
            filled.append([*itertools.chain.from_iterable(formatted)])
    return filled


def settings(scale: Scale, at: dict[str, Any]) -> list[str]:
    """The scale's settings for the mixer of a run."""
    if "mixer" not in at:
        return []
    own = (text for base, text in scale.settings.items() if zoo.get(base) == _plain(at["mixer"]))
    return [word for text in own for word in shlex.split(text)]


@cache
def _plain(mixer: str) -> Any:
    return zoo.plain(zoo.get(mixer))


def restricted(scale: Scale, only: list[str]) -> Scale:
    """The scale with some values of its axes only: ["mixer=gla,softmax-gla", "seed=0"]. InputError for an unknown axis
    or value."""
    axes = dict(scale.axes)
    for name, chosen in recipes.assignments(only).items():
        if name not in axes:
            raise InputError(
                f"--only {name}={chosen}: there is no axis {name!r}; expected {', '.join(axes) or 'no --only'}"
            )
        meanings = [meant(name, str(value)) for value in axes[name]]
        named = [meant(name, text) for text in zoo.split(chosen)]
        if not named or not all(meaning in meanings for meaning in named):
            raise InputError(f"--only {name}={chosen}: expected some of {', '.join(map(str, axes[name]))}")
        axes[name] = [axes[name][meanings.index(meaning)] for meaning in named]
    return replace(scale, axes=axes)


def meant(axis: str, value: str) -> Any:
    """What a value of an axis stands for: of mixers the spec, which several expressions can have."""
    return zoo.get(value) if axis == "mixer" else value


def script(steps: list[list[str]]) -> list[str]:
    """The steps as a shell script that continues where it was interrupted: a text that is there is not prepared again,
    and the other commands continue by themselves."""
    lines = ["set -e"]
    for step in steps:
        made = step[step.index("--output") + 1] if "prepare" in step else ""
        lines.append(f"test -e {shlex.quote(made)} || {shlex.join(step)}" if made else shlex.join(step))
    return lines
