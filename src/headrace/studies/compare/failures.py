"""What did not work: scores at chance, gates that have collapsed, heads that are dead."""

from collections.abc import Iterator
from typing import Any

from .summary import Comparison, count, show, show_contender, task_of

NEAR = 0.02  # above chance, a score is named as one near it
COLLAPSED = 0.9  # of all that is written or read, by one head
DEAD = 0.1  # of an even share


def failures(comparison: Comparison) -> Iterator[str]:
    yield from at_chance(comparison)
    for contender in comparison.gated:
        loads = [gate["load"] for arm in contender.arms for gate in arm["curve"][-1]["gates"]]
        if one := sum(max(load) >= COLLAPSED for load in loads):
            yield f"Collapsed: in {one} of {count(len(loads), 'gate')} of {contender.label} one head takes nearly all."
        heads = [share * len(load) for load in loads for share in load]
        if dead := sum(share < DEAD for share in heads):
            of = count(len(heads), "head")
            yield f"Dead: {dead} of {of} of {contender.label} take under a tenth of an even share."


def at_chance(comparison: Comparison) -> Iterator[str]:
    chance = level(comparison.plan["task"])
    lost = [c for c in comparison.finished if chance is not None and c.mean <= chance + NEAR]
    if chance is not None and lost:
        who = ", ".join(f"{c.label} {show_contender(c)}" for c in lost)
        yield f"Within {100 * NEAR:.0f} points of guessing ({show(lost[0].metric, chance)}): {who}."


def level(task: dict[str, Any]) -> float | None:
    """What guessing scores, of a task as plans write it; None where that is not known."""
    return getattr(task_of(task), "chance", None)
