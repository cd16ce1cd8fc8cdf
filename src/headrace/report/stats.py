"""The statistics of all studies, by scipy: means with 95 % intervals, tests of paired differences, and the correction
for a family of hypotheses, which each report declares (`differences`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import stdtr, stdtrit

LEVEL = 0.95  # confidence level of intervals
# Fewest seeds for a verdict on two models. If every run of two equal models either learns the task or does not, all
# seeds favour one of them in up to 12.5 % of comparisons with two seeds, and in up to 3.1 % with three.
SEEDS = 3
ROUNDING = 2.0**-22  # of float32, in the difference of two scores of at most 1


@dataclass(frozen=True)
class Mean:
    """A mean of n values, its standard error, and the degrees of freedom of Student's t. The error is infinite where
    the values tell nothing of their spread."""

    value: float
    error: float
    degrees: float
    n: int

    @property
    def reach(self) -> float:
        """Half the width of the 95 % confidence interval."""
        return student(self.degrees) * self.error if math.isfinite(self.error) else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """(−∞, ∞) if the error is not known."""
        return (-math.inf, math.inf) if math.isinf(self.reach) else (self.value - self.reach, self.value + self.reach)

    @property
    def p(self) -> float:
        """p of a mean of 0 by Student's t; 1 if the error is not known."""
        if not (math.isfinite(self.value) and math.isfinite(self.error)) or not self.value:
            return 1.0
        return float(2 * stdtr(self.degrees, -abs(self.value) / self.error)) if self.error else 0.0


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> Mean:
    """The mean with its standard error by the jackknife; without weights, that is the usual one. With weights, the mean
    is sum(values) / sum(weights), and the degrees of freedom are Kish's effective number of weights less 1."""
    x, w = np.array(values, float), np.ones(len(values)) if weights is None else np.array(weights, float)
    n, total = len(x), w.sum()
    if not n:
        return Mean(math.nan, math.inf, math.nan, 0)
    with np.errstate(invalid="ignore"):  # values that are not finite
        ratio = x.sum() / total
        error = math.inf if w.max() == total else np.sqrt((((x - ratio * w) / (total - w)) ** 2).sum() * (n - 1) / n)
    return Mean(float(ratio), float(error), float(total**2 / (w @ w) - 1), n)


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """The mean of one value per seed. Equal values have no spread to judge by: the error is infinite, unless a mean of
    0 is rejected by their signs, whose p is 2^(1 − n)."""
    estimate = mean(values)
    unknown = estimate.n > 0 and equal(values) and 2.0 ** (1 - estimate.n) > 1 - LEVEL
    return Mean(estimate.value, math.inf, estimate.degrees, estimate.n) if unknown else estimate


def equal(values: Sequence[float]) -> bool:
    """Whether values of the size of 1 or less differ by no more than the rounding of float32."""
    return max(values) - min(values) <= ROUNDING


def student(degrees: float) -> float:
    """Half the width of a 95 % confidence interval in standard errors, by Student's t."""
    return float(stdtrit(degrees, (1 + LEVEL) / 2))


def paired(differences: Sequence[float], test: str = "t") -> float:
    """p of a mean of 0 by Student's t or, for test="wilcoxon", by signed ranks. Equal differences have no spread for
    Student's t: for them, p is that of signed ranks in both tests, 2^(1 − n)."""
    if len(differences) < 2 or max(map(abs, differences)) <= ROUNDING:
        return 1.0
    if equal(differences):  # of 14 or more scipy's p is an approximation
        return 2.0 ** (1 - len(differences))
    return float((stats.ttest_1samp(differences, 0) if test == "t" else stats.wilcoxon(differences)).pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's corrected p: m − i + 1 times the i-th smallest of m, at most 1 and at least what a smaller p gets."""
    order, m = np.argsort(p, kind="stable"), len(p)
    corrected = np.empty(m)
    corrected[order] = np.maximum.accumulate(np.array(p, float)[order] * (m - np.arange(m))).clip(max=1)
    return corrected.tolist()


def above(right: int, rows: int, chance: float) -> bool:
    """Whether guesses, each right with the probability `chance`, get `right` of `rows` or more with a probability of at
    most 2.5 % (binomial test)."""
    return bool(stats.binomtest(right, rows, chance, "greater").pvalue <= (1 - LEVEL) / 2)
