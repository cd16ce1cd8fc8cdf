"""Findings of a comparison of many mixers: counts in place of a sentence for each pair."""

from collections.abc import Iterator

from ...report.numbers import count
from .pairwise import Difference
from .summary import Comparison, Contender, show_contender


def tally(differences: list[Difference]) -> str:
    """The number of backbones that competition makes better, makes worse or leaves without a clear difference."""
    n = len(differences)
    if max(len(d.gains) for d in differences) == 1:
        ahead = sum(d.mean > 0 for d in differences)
        return f"competition is ahead for {ahead} of {count(n, 'backbone')}, in one seed, which is too few to judge"
    kinds = {"better": [d.b for d in differences if d.better], "worse": [d.b for d in differences if d.worse]}
    said = [f"{len(found)} {kind} ({names(found)})" for kind, found in kinds.items() if found]
    even = n - sum(map(len, kinds.values()))
    said += [f"{even} without a clear difference"] if even else []
    return f"effect of competition on {count(n, 'backbone')}: {'; '.join(said)}, each judged by its 95 % interval"


def best_and_last(comparison: Comparison) -> Iterator[str]:
    ranked = comparison.finished
    best, last = (", ".join(f"{c.label} {show_contender(c)}" for c in part) for part in (ranked[:3], ranked[-3:]))
    yield f"Best mean scores of {len(ranked)} mixers: {best}; worst: {last}."


def names(contenders: list[Contender]) -> str:
    return ", ".join(c.label for c in contenders)
