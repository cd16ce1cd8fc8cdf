"""Sentences on which quantities (parameters, state size, FLOPs) the models of a comparison share."""

from .plan import MATCHED
from .summary import Comparison, Contender

QUANTITIES = {  # field -> (name, format of a value)
    "parameters": ("parameters", "{:,}"),
    "state_bytes": ("state sizes", "{:,} bytes"),
    "flops": ("FLOPs of a forward pass", "{:,} per row"),
}


def conditions(comparison: Comparison) -> list[str]:
    """One sentence on the quantities that are matched (within a factor MATCHED) and one on those that are not; empty
    for a single model."""
    matched, unmatched = [], []
    for field, (name, form) in QUANTITIES.items():
        models = by_size(comparison, field)
        if len(models) < 2:
            continue
        small, large = models[0], models[-1]
        low, high = small.constant(field), large.constant(field)
        if high <= MATCHED * low:
            matched.append(f"{name} (within {high / low - 1:.1%})" if low else f"{name} (all zero)")
            continue
        ratio = f"differ by up to {high / low:.2f}×" if low else "differ"
        unmatched.append(f"{name} {ratio} ({small.label} {form.format(low)}, {large.label} {form.format(high)})")
    if uncounted := [c.label for c in comparison.contenders if c.constant("flops") is None]:
        unmatched.append(f"FLOPs are not counted for {', '.join(uncounted)}")
    said = [f"Matched: {', '.join(matched)}."] if matched else []
    return said + ([f"Not matched: {'; '.join(unmatched)}."] if unmatched else [])


def by_size(comparison: Comparison, field: str) -> list[Contender]:
    """Contenders with a known value of the field, the smallest first."""
    known = (c for c in comparison.contenders if c.constant(field) is not None)
    return sorted(known, key=lambda c: c.constant(field))
