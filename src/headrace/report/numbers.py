"""Measured numbers as text, and their quartiles, as reports and terminals show them."""

from collections.abc import Sequence
from statistics import median, quantiles


def count(n: int, noun: str) -> str:
    """A number with its noun: "1 seed", "3 seeds"."""
    return f"{n:,} {noun}" + ("s" if n != 1 else "")


def compact(value: float) -> str:
    """A number with three digits and a suffix k, M or G."""
    value = float(f"{value:.3g}")  # 999.9 is 1k
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def significant(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, and all digits before the point."""
    return f"{value:,.0f}" if 10 ** (digits - 1) <= value < 1e12 else f"{value:.{digits}g}"


def quartiles(numbers: Sequence[float]) -> list[float]:
    """The three quartiles; of up to three numbers the smallest, the median and the largest."""
    return quantiles(numbers, n=4) if len(numbers) > 3 else [min(numbers), median(numbers), max(numbers)]


def spread(numbers: Sequence[float]) -> float | None:
    """The interquartile range divided by the median; None for fewer than two numbers."""
    low, middle, high = quartiles(numbers)
    return (high - low) / middle if len(numbers) > 1 else None


def out_of(finished: int, lost: int) -> str:
    """The number of runs behind a mean: "3", or "2 of 3" if one has diverged."""
    return f"{finished} of {finished + lost}" if lost else str(finished)


def seeds_of(finished: int, lost: int, noun: str = "seed") -> str:
    """The seeds behind a mean: "3 seeds", or "2 of 3 seeds"."""
    return f"{out_of(finished, lost)} {noun}" + ("s" if finished + lost != 1 else "")
