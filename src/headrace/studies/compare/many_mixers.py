"""What a comparison of many mixers shows: counts, where a sentence for each pair would not be read."""

from collections.abc import Iterator

from .pairwise import Difference
from .summary import Comparison, Contender, count, show_contender


def tally(differences: list[Difference]) -> str:
    """How many backbones gain by competition."""
    n = len(differences)
    if max(len(d.gains) for d in differences) == 1:
        ahead = sum(d.mean > 0 for d in differences)
        return f"in one seed, too few to tell mixers apart, competition is ahead in {ahead} of {count(n, 'backbone')}"
    kinds = {"better": [d.b for d in differences if d.better], "worse": [d.b for d in differences if d.worse]}
    said = [f"{len(found)} {kind} ({names(found)})" for kind, found in kinds.items() if found]
    even = n - sum(map(len, kinds.values()))
    said += [f"{even} without a clear difference"] if even else []
    return f"with competition, of {count(n, 'backbone')}: {'; '.join(said)}, by a 95 % interval for each"


def best_and_last(comparison: Comparison) -> Iterator[str]:
    ranked = comparison.finished
    best, last = (", ".join(f"{c.label} {show_contender(c)}" for c in part) for part in (ranked[:3], ranked[-3:]))
    yield f"Of {len(ranked)} mixers, the highest means are of {best}; the lowest of {last}."


def names(contenders: list[Contender]) -> str:
    return ", ".join(c.label for c in contenders)
