"""Suites: a fixed list of plans that every mixer runs by itself, so that its row stands beside those of others."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import tasks
from ..files.results import file_names
from ..utils.errors import InputError
from .plan import ArmRecipe, Plan, Shape, Study, Tuning

REFERENCE = "transformer"  # every model of a suite has as many parameters as this one's
TRACKING = Plan(
    "tracking",
    (REFERENCE,),
    tasks.Parity(length=32),
    Shape(layers=1, heads=4, mlp=128),
    ArmRecipe(steps=400, batch_size=32, evaluations=3),
    seeds=5,
    tuning=Tuning("lr", (3e-3, 6e-3, 1.2e-2), (5,)),
    reference=REFERENCE,
)
RECALL = replace(TRACKING, shape=Shape(layers=2, heads=4, mlp=128), tuning=Tuning("lr", (1.5e-3, 3e-3, 6e-3), (5,)))


def plan(base: Plan, name: str, task: tasks.Task, **recipe: Any) -> Plan:
    return replace(base, name=name, task=task, recipe=replace(base.recipe, **recipe))


SMALL = (
    plan(TRACKING, "parity", tasks.Parity(length=32)),
    plan(TRACKING, "s3", tasks.S3(length=16), steps=500),
    # Permutations that move three points at most are products of two reflections; all 120 are not learnt in this time.
    plan(TRACKING, "s5", tasks.S5(length=8, moved=3), steps=1000, batch_size=64),
    plan(TRACKING, "flip-flop", tasks.FlipFlop(length=32)),
    plan(TRACKING, "dyck", tasks.Dyck(length=32)),
    plan(RECALL, "mqar", tasks.Mqar(vocabulary=72, pairs=4, length=16), steps=600, batch_size=64),
    plan(RECALL, "selective-copy", tasks.SelectiveCopy(symbols=8, copied=4, length=24)),
    plan(RECALL, "needle", tasks.Induction(length=32), steps=600),
    plan(RECALL, "text", tasks.Text(length=64), batch_size=16),
)
SUITES: dict[str, tuple[Plan, ...]] = {"small": SMALL}


def of_mixer(suite: str, mixer: str) -> Study:
    """The study of a mixer's row."""
    return Study(suite, f"The suite {suite}: {mixer}", tuple(replace(plan, mixers=(mixer,)) for plan in SUITES[suite]))


def studies(suite: str, mixers: Sequence[str]) -> dict[str, Study]:
    """The name of a mixer's folder -> the study of its row. InputError for an unknown suite."""
    if suite not in SUITES:
        raise InputError(f"--suite {suite!r}; expected one of {', '.join(SUITES)}")
    names = file_names(mixers, lambda mixer: re.sub(r"[^a-z0-9.+]+", "-", mixer.lower()).strip("-"))
    return {names[mixer]: of_mixer(suite, mixer) for mixer in mixers}
