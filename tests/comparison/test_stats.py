"""The statistics of studies against scipy, permutations, leave-one-out and hand-worked values."""

import math
from dataclasses import replace
from itertools import combinations, product
from statistics import fmean

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats as by_scipy

from headrace.comparison.defaults import PAIR, REVERSE
from headrace.comparison.findings import between, judged
from headrace.comparison.hypotheses import UNITS, answer, differences, length_held, speed, table_of_means
from headrace.comparison.page import DIFFERENCES
from headrace.comparison.rows import converged
from headrace.comparison.summary import summarize
from headrace.evaluation.scores import ROWS
from headrace.report import stats
from headrace.report.differences import BETTER, WORSE, over_seeds
from stored import question, results, row, rows


# --- means and intervals ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_mean_and_interval_are_those_of_scipy(n):
    values = np.random.default_rng(n).normal(size=n)
    for mean in (stats.mean(values), stats.mean_over_seeds(values), stats.mean(values, [2.5] * n)):
        scale = values.mean() / mean.value  # 1, or the weight
        expected = by_scipy.t.interval(0.95, n - 1, values.mean(), by_scipy.sem(values))
        assert (mean.n, mean.degrees) == (n, pytest.approx(n - 1))
        assert tuple(scale * end for end in mean.interval) == pytest.approx(expected)
        assert mean.p == pytest.approx(by_scipy.ttest_1samp(values, 0).pvalue)


def test_the_error_of_a_ratio_is_that_of_leaving_one_out():
    generator = np.random.default_rng(0)
    values, weights = generator.normal(size=12), generator.random(12) + 0.5
    without = [(values.sum() - x) / (weights.sum() - w) for x, w in zip(values, weights, strict=True)]
    ratio = values.sum() / weights.sum()
    mean = stats.mean(values, weights)
    assert mean.value == pytest.approx(ratio)
    assert mean.error == pytest.approx(math.sqrt(11 / 12 * sum((one - ratio) ** 2 for one in without)))
    assert mean.degrees == pytest.approx(weights.sum() ** 2 / (weights**2).sum() - 1)


@pytest.mark.parametrize(
    ("values", "weights"),
    [([], None), ([0.5], None), ([0.1, 0.2], [1.0, 0.0]), ([math.nan, 1.0], None), ([math.inf] * 3, None)],
)
def test_values_without_a_spread_or_not_finite_have_no_interval(values, weights):
    mean = stats.mean(values, weights)
    assert math.isinf(mean.reach) and mean.interval == (-math.inf, math.inf) and mean.p == 1


@pytest.mark.parametrize(("n", "known"), [(1, False), (2, False), (5, False), (6, True), (9, True)])
def test_equal_values_have_an_interval_only_where_their_signs_reject_0(n, known):
    """2^(1 − n) is 1/16 for five and 1/32 for six. Sums such as 0.43 + 0.5 are rounded, each in its way."""
    values = [base + 0.5 - base for base in (0.43, 0.51, 0.07, 0.3, 0.9, 0.11, 0.2, 0.7, 0.13)[:n]]
    assert math.isfinite(stats.mean_over_seeds(values).reach) == known


# --- paired tests ----------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(-1, 1), min_size=3, max_size=8))
def test_t_of_differences_is_that_of_scipy(differences):
    assume(max(differences) - min(differences) > 1e-3)
    p, expected = stats.paired(differences), by_scipy.ttest_rel(differences, [0.0] * len(differences))
    assert p == pytest.approx(expected.pvalue)
    low, high = stats.mean_over_seeds(differences).interval
    assert (p < 0.05) == (low > 0 or high < 0) or p == pytest.approx(0.05)


@pytest.mark.parametrize("differences", [(0.4, 0.2, 0.3), (0.1, -0.2, 0.3, 0.4, -0.5), (0.25, 0.25, 0.0, -0.25, 0.5)])
def test_signed_ranks_are_exact_over_all_signs(differences):
    """Ties and a difference of 0, which is left out, among them."""
    known = [x for x in differences if x]
    ranks = by_scipy.rankdata(np.abs(known))
    center = ranks.sum() / 2
    sums = [sum(r for r, s in zip(ranks, signs, strict=True) if s) for signs in product((0, 1), repeat=len(known))]
    ours = abs(sum(r for r, x in zip(ranks, known, strict=True) if x > 0) - center)
    assert stats.paired(differences, "wilcoxon") == pytest.approx(fmean(abs(s - center) >= ours for s in sums))


@pytest.mark.parametrize("test", ["t", "wilcoxon"])
@pytest.mark.parametrize(
    ("differences", "p"),
    [([], 1), ([0.5], 1), ([0.5] * 2, 1 / 2), ([0.0] * 3, 1), ([-0.5] * 5, 1 / 16), ([0.5] * 14, 2**-13)],
)
def test_equal_differences_are_judged_by_their_signs(test, differences, p):
    """Two of 2^n choices of signs are as extreme."""
    for gap in (0.0, 1e-8):
        assert stats.paired([x + gap * i for i, x in enumerate(differences)], test) == pytest.approx(p)


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(p):
    """The largest m · min p over all sets of m hypotheses that hold the one in question."""
    for i, corrected in enumerate(stats.holm(p)):
        sets = (chosen for m in range(1, len(p) + 1) for chosen in combinations(range(len(p)), m) if i in chosen)
        assert corrected == pytest.approx(min(1, max(len(chosen) * min(p[j] for j in chosen) for chosen in sets)))


@pytest.mark.parametrize(
    ("right", "rows", "chance", "more"),
    [(2, 2, 0.5, False), (5, 5, 0.5, False), (6, 6, 0.5, True), (36, 100, 0.275, False), (38, 100, 0.275, True)],
)
def test_above_chance_is_the_tail_of_a_binomial(right, rows, chance, more):
    tail = sum(math.comb(rows, k) * chance**k * (1 - chance) ** (rows - k) for k in range(right, rows + 1))
    assert stats.above(right, rows, chance) == more == (tail <= 0.025)


# --- families and verdicts -------------------------------------------------------------------------------------------
def test_differences_are_paired_by_seed_and_corrected_over_the_family():
    a, b, c = (0.9, 0.8, 0.95), (0.5, 0.6, 0.65), (0.7, 0.9, 0.6)
    runs = [*rows(a=a, b=b, c=c), row("a", 9, 0.0), row("a", 1, 0.0, trial=True), row("b", 3, None)]
    asked = question(pairs=(("a", "b"), ("a", "c")))
    ((first, second),) = differences([(asked, runs[::-1])])
    by_t = by_scipy.ttest_rel(a, b)
    assert (first.where, first.mean.n, first.lost, second.lost) == ("p", 3, 1, 0)
    assert first.mean.interval == pytest.approx(tuple(by_t.confidence_interval(0.95)))
    assert first.p == pytest.approx(by_t.pvalue) and first.corrected == pytest.approx(2 * by_t.pvalue)
    assert second.corrected == pytest.approx(by_scipy.ttest_rel(a, c).pvalue)
    (own, _), (other, _) = differences([(asked, runs)] * 2)
    assert own == other and own.corrected == pytest.approx(4 * by_t.pvalue), "of both studies"


@pytest.mark.parametrize(
    ("n", "value", "corrected", "verdict"),
    [(2, 1.0, 1e-9, "too few seeds"), (3, 1.0, 0.05, "not told apart"), (3, 1.0, 0.0499, "more"),
     (3, -1.0, 0.0499, "less")],
)  # fmt: skip
def test_a_verdict_needs_three_seeds_and_a_corrected_p_below_one_in_twenty(n, value, corrected, verdict):
    one = over_seeds("a", "b", [value + 0.1 * i for i in range(n)], UNITS["score"])
    assert replace(one, corrected=corrected).verdict == verdict


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_equal_bimodal_models_get_a_verdict_in_at_most_one_of_twenty(n):
    """Scores of 0 or 1 by the toss of a coin, all 4^n of n seeds. With two seeds, 1 in 8 would favour one model."""
    verdicts = []
    for scores in product((0.0, 1.0), repeat=2 * n):
        gains = [a - b for a, b in zip(scores[:n], scores[n:], strict=True)]
        one = over_seeds("a", "b", gains, UNITS["score"])
        verdicts.append(replace(one, corrected=one.p).verdict in ("more", "less"))
    assert fmean(verdicts) <= 0.05


def test_three_runs_that_learn_a_task_or_fail_tell_equal_models_apart_in_3_of_100_differences():
    """Scores near 0 or 1: where all three seeds favour one model, in 2 of 64 cases, t rejects far below any level."""
    pairs = product(product((0.0, 1.0), repeat=2), repeat=3)
    cases = [[a - b + 0.001 * seed for seed, (a, b) in enumerate(own)] for own in pairs]
    assert fmean(over_seeds("a", "b", gains, UNITS["score"]).p < 1e-5 for gains in cases) == 2 / 64
    assert "in up to 3.1 % of differences" in DIFFERENCES


def test_a_comparison_in_which_every_run_diverged_is_reported():
    """It stays the first, which has the primary difference."""
    runs = [*rows(a=[None] * 3, b=[None] * 3), *(one | {"comparison": "q"} for one in rows(a=[0.9] * 3, b=[0.1] * 3))]
    (tests,) = differences([(question(), runs)])
    assert [(one.where, one.mean.n, one.lost) for one in tests] == [("p", 0, 3), ("q", 3, 0)]
    assert answer(question(), tests) == "Does it help? At p, A and B have no seed in which neither diverged."
    assert table_of_means(question(), runs)[1][:4] == ["A", "p", "0 of 3", "diverged"]


def test_a_value_is_at_an_end_of_the_range_of_its_own_comparison():
    """Both hold 4: in p no longer row was tested."""
    lengths = {"p": {2: 1.0, 4: 1.0}, "q": {1: 1.0, 4: 0.9, 8: 0.0}}
    runs = [row("a", 0, 0.9, comparison=name, by_length=own) for name, own in lengths.items()]
    table = table_of_means(question("capacity"), runs)
    assert [line[1:] for line in table[1:]] == [["p", "1", "4", "1"], ["q", "1", "4", "0"]]


def test_mixers_of_a_comparison_are_compared_by_the_same_interval():
    (comparison,) = summarize(results([[0.5, 0.5, 0.5, None], [0.6, 0.6, 0.9, 0.99]]))
    difference = between(*comparison.contenders[::-1])
    assert (difference.mean.n, difference.lost) == (3, 1)
    assert difference.mean.interval == pytest.approx((0.2 - 0.4303, 0.2 + 0.4303), abs=1e-4), "not of the median, 0.1"
    assert comparison.contenders[1].spread == pytest.approx(np.std([0.6, 0.6, 0.9, 0.99], ddof=1))


def alike(generator, shape):
    """Scores around one mean, which rows of a seed share in part."""
    return 0.5 + 0.05 * generator.normal(size=shape) + 0.05 * generator.normal(size=shape[1])


def learned_or_not(generator, shape):
    """Each run either learns the task or stays at chance."""
    return np.where(generator.random(shape) < 0.5, 0.9, 0.1)


@pytest.mark.parametrize("drawn", [alike, learned_or_not])
@pytest.mark.parametrize(("plan", "seeds"), [(PAIR, 3), (PAIR, 5), (replace(REVERSE, mixers=REVERSE.mixers[:3]), 5)])
def test_a_report_on_equal_models_rarely_calls_a_difference(drawn, plan, seeds):
    """At most 5 % of reports, with room for three standard errors of 200; without Holm's rule it would be 14 % of
    those with four differences, and of three models the best is chosen by its score."""
    generator, reports = np.random.default_rng(seeds), 200
    called = [
        {one.verdict for one in judged(summarize(results(scores.tolist(), plan)))[0]} & {BETTER, WORSE}
        for scores in (drawn(generator, (len(plan.mixers), seeds)) for _ in range(reports))
    ]
    assert fmean(map(bool, called)) <= 0.05 + 3 * (0.05 * 0.95 / reports) ** 0.5


def test_differences_of_all_comparisons_of_a_report_are_one_family():
    data = results([[0.5, 0.6, 0.7], [0.8, 0.9, 0.98], [0.7, 0.8, 0.9]])
    (alone,), together = judged(summarize(data)), judged(summarize(data) * 2)
    least = min(alone, key=lambda one: one.p)
    assert len(alone) == 3 and least.corrected == pytest.approx(3 * least.p)
    assert all(min(one.corrected for one in own) == pytest.approx(6 * least.p) for own in together)


def test_the_best_mixers_of_a_comparison_count_as_all_its_pairs_whatever_stands_beside_it():
    """Beside a comparison that all mixers solve, which has no pair with a verdict."""
    solved, hard = [[0.995, 1.0, 0.999]] * 3, [[0.5, 0.6, 0.7], [0.8, 0.9, 0.98], [0.7, 0.8, 0.9]]
    easy, other = (summarize(results(scores, REVERSE))[0] for scores in (solved, hard))
    (_, (best,)), ((alone,),) = judged([easy, other]), judged([other])
    assert best.corrected == alone.corrected == pytest.approx(3 * best.p)


def accuracies(generator, n):
    """Rows that two equal models get right or wrong independently, at any difficulty."""
    first, second = generator.random((2, n)) < generator.random()
    return second * 1.0 - first, np.ones(n)


def opposites(generator, n):
    """Exactly one of two models is right on each row: all equal differences are likely."""
    return np.where(generator.random(n) < 0.5, 1.0, -1.0), np.ones(n)


def likelihoods(generator, n):
    """Log-likelihoods of rows whose lengths differ by a factor of 7 and more, and whose difficulty is that of a row."""
    words = np.exp(generator.normal(size=n))
    return words * (generator.normal(size=n) - generator.normal(size=n)), words


@pytest.mark.parametrize("drawn", [accuracies, opposites, likelihoods])
@pytest.mark.parametrize("n", [10, 20])
def test_evaluation_of_equal_models_rarely_gives_a_verdict(drawn, n):
    """An exact test would err in at most 5 % of cases. Of rows that are right or wrong, t errs in up to 6.5 % (by
    enumeration, for n from 10 to 50); the bound has room for three standard errors of 2,000 cases."""
    generator, cases = np.random.default_rng(n), 2000
    wrong = fmean(stats.mean(*drawn(generator, n)).p < 0.05 for _ in range(cases))
    assert n >= ROWS and wrong <= 0.065 + 3 * (0.065 * 0.935 / cases) ** 0.5


# --- what a run is measured by ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("curve", "held"),
    [({8: 1.0, 16: 0.95, 32: 0.75, 64: 0.95}, 4.25),  # a quarter of the way from 0.95 to 0.75; what comes later is luck
     ({8: 0.9, 16: 0.9}, 4.0), ({8: 0.89, 16: 1.0}, 3.0), ({8: 1.0, 16: 0.95, 32: math.nan, 64: 0.95}, 4.0)],
)  # fmt: skip
def test_the_length_held_is_interpolated_and_stays_on_the_grid(curve, held):
    assert length_held({"by_length": curve}) == pytest.approx(held)


def test_a_score_that_is_reached_before_the_first_step_takes_no_steps():
    assert [list(speed(row("a", 0, 0.9, reached=n)).values()) for n in (0, 30, None)] == [[0.0], [30.0], [100.0]]


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        ([3.0, 1.02, 1.0], True),  # of a fall by 2, the last third of the steps gave a hundredth
        ([3.0, 1.06, 1.0], False),  # and here three
        ([3.0, 1.0, 1.5], False),  # it rises again
        ([3.0, 1.0, 1.03], True),  # by less than 2 % of its fall
        ([3.0, 3.1, 3.2], False),  # it only rises
        ([3.0, 3.0, 3.0], False),  # it never moves
        ([3.0], False),
    ],
)
def test_a_run_has_converged_if_its_loss_fell_and_settled(losses, settled):
    steps = (0, 3, 5)[: len(losses)]
    curve = [{"step": step, "scores": {"loss": loss}} for step, loss in zip(steps, losses, strict=True)]
    assert converged({"diverged": False, "curve": curve}) == settled
    assert not converged({"diverged": True, "curve": curve})
