"""Makes a study from the arguments of `headrace compare`: the defaults of the task with the changes of the user."""

import difflib
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ... import zoo
from ...spec.serialise import admitted
from ...spec.stack import Decoder
from ...tasks import Task, Text
from ...utils.errors import InputError, nearest
from . import tuning
from .defaults import DEFAULTS, DEMO
from .plan import ArmRecipe, Plan, Shape, Study, numbers
from .question import read as read_plan


def choose(
    task: str | None, files: list[str], tokenizer: str | None, changes: dict[str, Any], sweep: str | None = None,
    tune: str | None = None, tune_seeds: str | int | None = None,
) -> Study:  # fmt: skip
    """The study for a task, or the demo if nothing is chosen.

    Args:
        task: an expression such as `mqar(pairs=16)`; None: text if `files` are given, else pair.
        files: text files for a language-modelling task.
        tokenizer: path of a tokenizer.json for a language-modelling task.
        changes: values of fields of the plan, shape and recipe, and of `length`; None keeps the default.
        sweep: `FIELD=VALUE,VALUE,…` for a plan at each value of a field.
        tune: `FIELD=VALUE,VALUE,…` for a search over values of a field of the recipe, for each mixer apart.
        tune_seeds: seeds of the search, as for `seeds`; None: others than those reported.

    Raises:
        InputError: an unknown task or field, or a text file or tokenizer for a task without text.
    """
    changes = {name: value for name, value in changes.items() if value is not None}
    if "seeds" in changes:
        changes["seeds"] = seeds(changes["seeds"])
    if task is None and not files and "mixers" not in changes and sweep is None:
        if tokenizer is not None:
            raise InputError(f"--tokenizer {tokenizer} needs a task with text; add --text FILE or --task text")
        return tuned(replace(DEMO, plans=tuple(changed(plan, changes) for plan in DEMO.plans)), tune, tune_seeds)
    swept_field = [sweep.partition("=")[0].strip()] if sweep else []
    tuned_field = [tune.partition("=")[0].strip()] if tune else []
    settings = [*changes, *(zoo.expression(task, "--task")[1] if task else ()), *swept_field, *tuned_field]
    if twice := next((name for i, name in enumerate(settings) if name in settings[:i]), None):
        raise InputError(
            f"{twice!r} is set twice, by --task, --sweep, --tune or its own option; expected each field once"
        )
    plan = default(task or ("text" if files else "pair"))
    if files or tokenizer is not None:
        if not isinstance(plan.task, Text):
            raise InputError(
                f"--task {task} has no text; expected text, masked or spans with text files or --tokenizer"
            )
        plan = replace(plan, task=replace(plan.task, files=tuple(files), tokenizer=tokenizer))
    plan = changed(plan, changes)
    study = swept(plan, sweep) if sweep else Study(plan.name, f"Mixers compared: {plan.name}", (plan,))
    return tuned(study, tune, tune_seeds)


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
    question, options = read_plan(path)
    apart = {name: options.pop(name, None) for name in ("task", "text", "tokenizer", "sweep", "tune", "tune_seeds")}
    known = {"mixers", "seeds", "length", *(f.name for record in (Shape, ArmRecipe) for f in fields(record))}
    if unknown := next((name for name in options if name not in known), None):
        near = nearest(unknown, known | apart.keys())
        raise InputError(f"--plan {str(path)!r} sets {unknown!r}, which is no option; the nearest is {near!r}")
    text = apart.pop("text") or []
    files = [text] if isinstance(text, str) else text
    study = choose(apart.pop("task"), files, apart.pop("tokenizer"), options, **apart)
    return replace(study, name=path.stem, title=question.text, question=question)


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
        near = difflib.get_close_matches(name, DEFAULTS, 1) or DEFAULTS
        raise InputError(f"--task {name!r} is unknown; expected {' or '.join(near)}")
    plan = DEFAULTS[name]
    values = {field: zoo.literal(value) for field, value in settings.items()}
    return replace(plan, task=refined(plan.task, values)) if values else plan


def refined(task: Task, values: dict[str, Any]) -> Task:
    """The task with new values of some fields; `length` is a field of every task."""
    names = [f.name for f in fields(task)]  # type: ignore[arg-type]
    if unknown := next((name for name in values if name not in (*names, "length")), None):
        raise InputError(f"the task {task.name} has no field {unknown!r}; the nearest is {nearest(unknown, names)!r}")
    if "length" in values and "length" not in names:
        task, values = task.resized(values["length"]), {k: v for k, v in values.items() if k != "length"}
    return replace(task, **admitted(type(task), values, task.name))  # type: ignore[type-var]


def swept(plan: Plan, sweep: str) -> Study:
    """A study with a plan for each value of a field of the task, the shape or the recipe."""
    name, _, listed = (part.strip() for part in sweep.partition("="))
    values = [zoo.literal(value) for value in zoo.split(listed)]
    if len(set(values)) < len(values) or not values:
        raise InputError(f"--sweep {sweep!r}; expected FIELD=VALUE,VALUE,… with distinct values")
    plans = tuple(at(plan, name, value) for value in values)
    about = {"field": name, "values": values}
    return Study(f"{plan.name}-by-{name}", f"Mixers compared: {plan.name}, by {name}", plans, about)


def at(plan: Plan, name: str, value: Any) -> Plan:
    """The plan with one field set to a value, and with the field and value added to its name."""
    own = {part: {f.name for f in fields(getattr(plan, part))} for part in ("task", "shape", "recipe")}
    own["task"].add("length")
    part = next((part for part, names in own.items() if name in names), None)
    if part is None:
        near = nearest(name, set.union(*own.values()))
        raise InputError(
            f"--sweep {name}={value}: neither the task nor the shape nor the recipe has a field {name!r}; the nearest "
            f"is {near!r}"
        )
    record: Any = getattr(plan, part)
    values = {name: value}
    changed: Any = (
        refined(record, values) if part == "task" else replace(record, **admitted(type(record), values, part))
    )
    spelt = re.sub(r"[^A-Za-z0-9.+]+", "-", str(value))
    return replace(plan, name=f"{plan.name}-{name}-{spelt}", **{part: changed})


def changed(plan: Plan, changes: dict[str, Any]) -> Plan:
    of = lambda record: {f.name: changes[f.name] for f in fields(record) if f.name in changes}  # noqa: E731
    mixers = zoo.several(changes["mixers"]) if "mixers" in changes else plan.mixers
    # A hybrid needs as many layers as its pattern has; the other mixers get the same depth.
    patterns = (len(spec.layers) if isinstance(spec := zoo.get(mixer), Decoder) else 1 for mixer in mixers)
    changes = {"layers": max((plan.shape.layers, *patterns)), **changes}
    return replace(
        plan,
        mixers=mixers,
        seeds=changes.get("seeds", plan.seeds),
        task=plan.task.resized(changes["length"]) if "length" in changes else plan.task,
        shape=replace(plan.shape, **of(Shape)),
        recipe=replace(plan.recipe, **admitted(ArmRecipe, of(ArmRecipe), "recipe")),
    )
