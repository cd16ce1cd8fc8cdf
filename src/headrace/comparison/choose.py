"""Makes a study from the arguments of `headrace compare`: the defaults of the task with the changes of the user."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .. import zoo
from ..files.results import file_names
from ..spec.record import Kind, checked
from ..spec.serialize import admitted
from ..spec.stack import Decoder
from ..tasks import Task, Text
from ..utils import plugins
from ..utils.errors import InputError, nearest
from . import question, tuning
from .defaults import DEFAULTS, DEMO
from .plan import ArmRecipe, Plan, Shape, Study, numbers
from .widths import match_states


def choose(
    task: str | None, files: list[str], tokenizer: str | None, changes: dict[str, Any], sweep: str | None = None,
    tune: str | None = None, tune_seeds: str | int | None = None, match: str | None = None,
) -> Study:  # fmt: skip
    """The study for a task, or the demo if nothing is chosen.

    Args:
        task: an expression such as `mqar(pairs=16)`; None: text if `files` are given, else pair.
        files: text files for a language-modelling task.
        tokenizer: of a language-modelling task: a file, a folder or a name on the Hub; None or "bytes": bytes.
        changes: values of fields of the plan, shape and recipe, and of `length`; None keeps the default.
        sweep: `FIELD=VALUE,VALUE,…` for a plan at each value of a field.
        tune: `FIELD=VALUE,VALUE,…` for a search over values of a field of the recipe, for each mixer apart.
        tune_seeds: seeds of the search, as for `seeds`; None: others than those reported.
        match: what the models have equally many of: parameters, or with "state" also numbers of the state.

    Raises:
        InputError: an unknown task or field, a field set twice, or a text file or tokenizer for a task without text.
    """
    changes = {name: value for name, value in changes.items() if value is not None}
    demo = task is None and not files and "mixers" not in changes and sweep is None
    if demo and tokenizer is not None:
        raise InputError(f"--tokenizer {tokenizer} needs a task with text; add --text FILE or --task text")
    alone = [option.partition("=")[0].strip() for option in (sweep, tune) if option]
    names = [*changes, *(zoo.expression(task, "--task")[1] if task else ()), *alone]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise InputError(
            f"{twice!r} is set twice, by --task, --sweep, --tune or its own option; expected each field once"
        )
    if demo:
        study = replace(DEMO, plans=tuple(changed(plan, changes) for plan in DEMO.plans))
    else:
        plan = changed(with_text(default(task or ("text" if files else "pair")), files, tokenizer), changes)
        study = swept(plan, sweep) if sweep else Study(plan.name, f"Mixers compared: {plan.name}", (plan,))
    return tuned(matched(study, match), tune, tune_seeds)


def matched(study: Study, match: str | None) -> Study:
    """The study with mixers whose states match, if `match` asks for it."""
    if match not in (None, "parameters", "state"):
        raise InputError(f"--match={match!r}; expected parameters or state")
    if match != "state":
        return study
    plans = tuple(replace(plan, mixers=match_states(plan.mixers, plan.shape)) for plan in study.plans)
    return replace(study, plans=plans)


def with_text(plan: Plan, files: list[str], tokenizer: str | None) -> Plan:
    if not files and tokenizer is None:
        return plan
    if not isinstance(plan.task, Text):
        raise InputError(
            f"--task {plan.task.name} has no text; expected text, masked or spans with text files or --tokenizer"
        )
    named = None if tokenizer == "bytes" else tokenizer
    return replace(plan, task=replace(plan.task, files=tuple(files), tokenizer=named))


def tuned(study: Study, tune: str | None, tune_seeds: str | int | None) -> Study:
    """The study with the search that `tune` asks for in each of its plans."""
    if tune is None:
        if tune_seeds is not None:
            raise InputError(f"--tune-seeds {tune_seeds} needs a search; add --tune FIELD=VALUE,VALUE,…")
        return study
    own = None if tune_seeds is None else numbers(seeds(tune_seeds))
    plans = tuple(replace(plan, tuning=tuning.parse(tune, plan.seed_numbers, own)) for plan in study.plans)
    return replace(study, plans=plans)


def planned(path: Path) -> Study:
    """The study of a plan's file (question.py). InputError for a file that is no plan, and for an unknown option."""
    asked, options = question.read(path)
    apart = {name: options.pop(name, None) for name in ("task", "text", "tokenizer", "sweep", "tune", "tune_seeds")}
    known = {"mixers", "seeds", "length", *(f.name for record in (Shape, ArmRecipe) for f in fields(record))}
    if unknown := next((name for name in options if name not in known), None):
        near = nearest(unknown, known | apart.keys())
        raise InputError(f"--plan {str(path)!r} sets {unknown!r}, which is no option; the nearest is {near!r}")
    text = apart.pop("text") or []
    files = [text] if isinstance(text, str) else text
    study = choose(apart.pop("task"), files, apart.pop("tokenizer"), options, **apart)
    if asked.measure == "capacity" and (without := next((p for p in study.plans if not p.task.by_length(1)), None)):
        raise InputError(
            f"--plan {str(path)!r} has measure: capacity, but the task {without.task.name} is tested at one length; "
            "expected a task with several, such as pair(least=4)"
        )
    return replace(study, name=path.stem, title=asked.text, question=asked)


def seeds(text: str | int | list[int]) -> int | tuple[int, ...]:
    """A number of seeds, or the seeds that a list of numbers and ranges names: "3", "10-14" or "7,10-14"."""
    if isinstance(text, list):
        return tuple(text)
    if isinstance(text, int) or text.strip().isdecimal():
        return int(text)
    ends = [part.split("-") for part in text.replace(" ", "").split(",")]
    if not all(len(pair) <= 2 and all(map(str.isdecimal, pair)) for pair in ends):
        raise InputError(f"--seeds {text!r}; expected a number of seeds, or seeds such as 10-14 or 7,10-14")
    named = tuple(seed for pair in ends for seed in range(int(pair[0]), int(pair[-1]) + 1))
    if not named or len(set(named)) < len(named):
        raise InputError(f"--seeds {text!r} names {'a seed twice' if named else 'none'}; expected different seeds")
    return named


def default(task: str) -> Plan:
    """The default plan of a task. The task is an expression that can set fields: `mqar(pairs=16, length=128)`."""
    name, settings = zoo.expression(task, "--task")
    if name not in DEFAULTS:
        plugins.load()
    if name not in DEFAULTS:
        raise InputError(f"--task {name!r} is unknown; expected one of {', '.join(DEFAULTS)} (--plugin adds others)")
    plan = DEFAULTS[name]
    return replace(plan, task=refined(plan.task, {field: zoo.literal(value) for field, value in settings.items()}))


def refined(task: Task, values: dict[str, Any], others: tuple[str, ...] = ()) -> Task:
    """The task with new values of some fields; `length` is a field of every task. others: fields that a wrong name may
    have meant."""
    names = [f.name for f in fields(task)]  # type: ignore[arg-type]
    if unknown := next((name for name in values if name not in (*names, "length")), None):
        near = nearest(unknown, (*names, *others))
        raise InputError(f"the task {task.name} has no field {unknown!r}; the nearest is {near!r}")
    if "length" in values and "length" not in names:
        length = checked(values["length"], (Kind(int),), task.name, "length")
        task, values = task.resized(length), {k: v for k, v in values.items() if k != "length"}
    return replace(task, **admitted(type(task), values, task.name))  # type: ignore[type-var]


def swept(plan: Plan, sweep: str) -> Study:
    """A study with a plan for each value of a field of the task, the shape or the recipe."""
    name, _, listed = (part.strip() for part in sweep.partition("="))
    values = [zoo.literal(value) for value in zoo.split(listed)]
    if len(set(values)) < len(values) or not values:
        raise InputError(f"--sweep {sweep!r}; expected FIELD=VALUE,VALUE,… with distinct values")
    spelt = file_names(map(str, values), lambda value: re.sub(r"[^A-Za-z0-9.+]+", "-", value))
    plans = tuple(replace(having(plan, {name: v}), name=f"{plan.name}-{name}-{spelt[str(v)]}") for v in values)
    about = {"field": name, "values": values}
    return Study(f"{plan.name}-by-{name}", f"Mixers compared: {plan.name}, by {name}", plans, about)


def changed(plan: Plan, changes: dict[str, Any]) -> Plan:
    """The plan with other mixers, seeds, and values of fields of its task, shape and recipe."""
    changes = dict(changes)
    mixers = zoo.several(changes.pop("mixers")) if "mixers" in changes else plan.mixers
    named = seeds(changes.pop("seeds")) if "seeds" in changes else plan.seeds
    # A hybrid needs as many layers as its pattern has; the other mixers get the same depth.
    patterns = (len(spec.layers) if isinstance(spec := zoo.get(mixer), Decoder) else 1 for mixer in mixers)
    layers = max((plan.shape.layers, *patterns))
    return replace(having(plan, {"layers": layers} | changes), mixers=mixers, seeds=named)


def having(plan: Plan, values: dict[str, Any]) -> Plan:
    """The plan with new values of fields of its task, shape and recipe."""
    shape, recipe = ({k: v for k, v in values.items() if k in cls.__dataclass_fields__} for cls in (Shape, ArmRecipe))
    rest = {name: value for name, value in values.items() if name not in shape | recipe}
    return replace(
        plan,
        task=refined(plan.task, rest, (*Shape.__dataclass_fields__, *ArmRecipe.__dataclass_fields__)),
        shape=replace(plan.shape, **admitted(Shape, shape, "shape")),
        recipe=replace(plan.recipe, **admitted(ArmRecipe, recipe, "recipe")),
    )
