"""Statistics and text of measured numbers, as reports and terminals show them."""

import math
from collections.abc import Sequence
from statistics import median, quantiles, stdev

from scipy.special import stdtrit

LEVEL = 0.95  # confidence level of intervals
# Fewest seeds for a verdict on two models. If every run of two equal models either learns the task or does not, all
# seeds favour one of them in up to 12.5 % of comparisons with two seeds, and in up to 3.1 % with three.
SEEDS = 3
ROUNDING = 2.0**-22  # of float32, in the difference of two scores of at most 1


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
    """The three quartiles; three times the number for a single one."""
    return quantiles(numbers, n=4) if len(numbers) > 1 else [*numbers] * 3


def spread(numbers: Sequence[float]) -> float | None:
    """The interquartile range divided by the median; None for fewer than two numbers."""
    if len(numbers) < 2:
        return None
    low, _, high = quartiles(numbers)
    return (high - low) / median(numbers)


def equal(numbers: Sequence[float]) -> bool:
    """Whether the numbers, of the size of 1 or less, differ by no more than the rounding of float32."""
    return max(numbers) - min(numbers) <= ROUNDING


def student(degrees: float) -> float:
    """Half the width of a 95 % confidence interval in standard errors, by Student's t."""
    return float(stdtrit(degrees, (1 + LEVEL) / 2))


def half_interval(numbers: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean, by Student's t. Infinite for a single number, and for
    equal ones unless a mean of 0 is rejected by their signs, whose p is 2^(1 − n): they have no spread to judge by."""
    n = len(numbers)
    if n < 2 or (equal(numbers) and 2.0 ** (1 - n) > 1 - LEVEL):
        return math.inf
    return student(n - 1) * stdev(numbers) / math.sqrt(n)


def out_of(finished: int, lost: int) -> str:
    """The number of runs behind a mean: "3", or "2 of 3" if one has diverged."""
    return f"{finished} of {finished + lost}" if lost else str(finished)


def seeds_of(finished: int, lost: int) -> str:
    """The seeds behind a mean: "3 seeds", or "2 of 3 seeds"."""
    return f"{out_of(finished, lost)} seed" + ("s" if finished + lost != 1 else "")
