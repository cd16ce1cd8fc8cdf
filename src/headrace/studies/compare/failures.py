"""Sentences on failures of a comparison: scores at chance, collapsed gates, dead heads."""

from collections.abc import Iterator
from typing import Any

from ...report.numbers import count
from .summary import Comparison, show, show_contender, task_of

NEAR = 0.02  # a score counts as chance up to this much above it
COLLAPSED = 0.9  # a gate is collapsed if one head has at least this mean share
DEAD = 0.1  # a head is dead if its mean share is below this part of an even share


def failures(comparison: Comparison) -> Iterator[str]:
    yield from at_chance(comparison)
    for contender in comparison.gated:
        loads = [gate["load"] for arm in contender.arms for gate in arm["curve"][-1]["gates"]]
        if one := sum(max(load) >= COLLAPSED for load in loads):
            of = count(len(loads), "gate")
            yield f"Collapsed gates: in {one} of {of} of {contender.label}, one head takes {COLLAPSED:.0%} or more."
        heads = [share * len(load) for load in loads for share in load]
        if dead := sum(share < DEAD for share in heads):
            of = count(len(heads), "head")
            yield f"Dead heads: {dead} of {of} of {contender.label} take less than {DEAD:.0%} of an even share."


def at_chance(comparison: Comparison) -> Iterator[str]:
    chance = level(comparison.plan["task"])
    lost = [c for c in comparison.finished if chance is not None and c.mean <= chance + NEAR]
    if chance is not None and lost:
        who = ", ".join(f"{c.label} {show_contender(c)}" for c in lost)
        yield f"At chance, no more than {100 * NEAR:.0f} points above {show(lost[0].metric, chance)}: {who}."


def level(task: dict[str, Any]) -> float | None:
    """The score of guessing on a task as a plan's JSON stores it; None if it is not known."""
    return getattr(task_of(task), "chance", None)
