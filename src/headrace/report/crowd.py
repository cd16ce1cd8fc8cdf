"""What a comparison of a crowd showed, in words: counted, where a sentence for each would not be read."""

import statistics
from collections.abc import Iterator

from .duels import Difference, count, pairs
from .summary import Comparison, Contender, show


def tally(comparison: Comparison) -> Iterator[str]:
    differences = [Difference(winner, base) for winner, base in pairs(comparison)]
    if not differences:
        return
    kinds = {"better": [d for d in differences if d.better], "worse": [d for d in differences if d.worse]}
    said = [f"{len(found)} {kind} ({names([d.b for d in found])})" for kind, found in kinds.items() if found]
    even = len(differences) - sum(map(len, kinds.values()))
    said += [f"{even} without a difference beyond the spread over seeds"] if even else []
    hint = "; one seed is a hint and no finding" if comparison.plan["seeds"] == 1 else ""
    yield f"Of {count(len(differences), 'backbone')}, with heads that compete: {'; '.join(said)}{hint}."


def best_and_last(comparison: Comparison) -> Iterator[str]:
    ranked = comparison.finished
    best, last = (", ".join(f"{c.label} {show(c.metric, c.mean)}" for c in part) for part in (ranked[:3], ranked[-3:]))
    yield f"Of {len(ranked)}, the best are {best}; the last are {last}."


def range_of_costs(comparison: Comparison) -> Iterator[str]:
    if found := pairs(comparison):
        slower = sorted(1 - winner.speed / base.speed for winner, base in found)
        share = max(winner.constant("gate_parameters") / base.constant("parameters") for winner, base in found)
        yield (
            f"Gates add at most {share:.1%} of the parameters and take {statistics.median(slower):.0%} of the tokens "
            f"per second in training (median; from {slower[0]:.0%} to {slower[-1]:.0%})."
        )


def names(contenders: list[Contender]) -> str:
    return ", ".join(c.label for c in contenders)
