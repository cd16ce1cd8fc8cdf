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
    """The mean, with its standard error by the jackknife, which without weights is the usual one. With weights it is
    the ratio of both sums, and the degrees are those of as many equal weights as would tell as much."""
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
    Student's t; then, too, it is that of signed ranks, which is 2^(1 − n)."""
    if len(differences) < 2 or max(map(abs, differences)) <= ROUNDING:
        return 1.0
    if equal(differences):  # of 14 or more scipy's p is an approximation
        return 2.0 ** (1 - len(differences))
    return float((stats.ttest_1samp(differences, 0) if test == "t" else stats.wilcoxon(differences)).pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's corrected p: the i-th smallest of m times m − i + 1, never below a smaller one's."""
    order, m = np.argsort(p, kind="stable"), len(p)
    corrected = np.empty(m)
    corrected[order] = np.maximum.accumulate(np.array(p, float)[order] * (m - np.arange(m))).clip(max=1)
    return corrected.tolist()


def above(right: int, rows: int, chance: float) -> bool:
    """Whether as many right rows have a probability of at most 2.5 % by guesses that are right with the probability
    `chance` (binomial test)."""
    return bool(stats.binomtest(right, rows, chance, "greater").pvalue <= (1 - LEVEL) / 2)
