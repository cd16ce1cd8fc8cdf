"""From what a user asked for to a study: the task's defaults, changed where the user says so."""

import difflib
from dataclasses import fields, replace
from typing import Any

from .. import zoo
from ..errors import InputError
from ..stack_spec import Decoder
from ..tasks import Text
from .defaults import DEFAULTS, DEMO
from .plan import Plan, Recipe, Shape, Study


def choose(task: str | None, files: list[str], tokenizer: str | None, changes: dict[str, Any]) -> Study:
    """`changes` are values of the plan's, the shape's and the recipe's fields and `length`; None leaves the default."""
    changes = {name: value for name, value in changes.items() if value is not None}
    if task is None and not files and "mixers" not in changes:
        if tokenizer is not None:
            raise InputError(f"--tokenizer {tokenizer} is for language modelling; add --text FILE or --task text")
        return replace(DEMO, plans=tuple(changed(plan, changes) for plan in DEMO.plans))
    plan = default(task or ("text" if files else "pair"))
    if files or tokenizer is not None:
        if not isinstance(plan.task, Text):
            raise InputError(
                f"--task {task} reads no text; text files and --tokenizer go with --task text, masked or spans"
            )
        plan = replace(plan, task=replace(plan.task, files=tuple(files), tokenizer=tokenizer))
    return Study(plan.name, f"Mixers compared: {plan.name}", (changed(plan, changes),))


def default(task: str) -> Plan:
    if task not in DEFAULTS:
        near = difflib.get_close_matches(task, DEFAULTS, 1) or DEFAULTS
        raise InputError(f"--task {task!r} is unknown; expected {' or '.join(near)}")
    return DEFAULTS[task]


def changed(plan: Plan, changes: dict[str, Any]) -> Plan:
    own = lambda record: {f.name: changes[f.name] for f in fields(record) if f.name in changes}  # noqa: E731
    mixers = zoo.several(changes["mixers"]) if "mixers" in changes else plan.mixers
    # A hybrid needs the depth of its pattern, and the others are compared with it at that.
    patterns = (len(spec.layers) if isinstance(spec := zoo.get(mixer), Decoder) else 1 for mixer in mixers)
    changes = {"layers": max((plan.shape.layers, *patterns)), **changes}
    return replace(
        plan,
        mixers=mixers,
        seeds=changes.get("seeds", plan.seeds),
        task=plan.task.resized(changes["length"]) if "length" in changes else plan.task,
        shape=replace(plan.shape, **own(Shape)),
        recipe=replace(plan.recipe, **own(Recipe)),
    )
