"""Studies that are written down first: the plan's file, the search for a learning rate, the rows and the statistic."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy import stats

from headrace.studies import stats as ours
from headrace.studies.compare import hypotheses
from headrace.studies.compare import rows as table
from headrace.studies.compare.arm import Curve, begin, train
from headrace.studies.compare.choose import choose, planned
from headrace.studies.compare.model import build
from headrace.studies.compare.page import write_report
from headrace.studies.compare.plan import ArmRecipe, Plan, Shape, Study, Tuning
from headrace.studies.compare.question import Question
from headrace.studies.compare.run import complete
from headrace.studies.compare.tuning import at_edge, best
from headrace.tasks import Pair, Text
from headrace.utils.errors import InputError
from headrace.utils.provenance import claim

PLANS = sorted((Path(__file__).parents[2] / "benchmarks" / "studies").glob("*.yaml"))
SMALL = Plan(
    "small",
    ("retnet", "softmax-retnet"),
    Pair(keys=6, pairs=4, queries=4),
    Shape(hidden_size=16, heads=4, mlp=0),
    ArmRecipe(steps=3, batch_size=4, evaluations=3, held_out=8),
    seeds=(3, 5),
    tuning=Tuning("lr", (1e-3, 1e-1), (7,)),
)
PLAN = """
question: Does it help?
task: pair(least=1)
sweep: pairs=2,4
tune: lr=1e-3,1e-2
tune_seeds: 8-9
seeds: 1-2
steps: 7
mixers:
  none: "{backbone}(heads.expand_v=1)"
  softmax: "softmax-{backbone}(heads.expand_v=1)"
over: [{backbone: retnet}, {backbone: gla}]
compare: [softmax - none]
measure: capacity
"""


def collected(rows, measure):
    """{place: {mixer: {seed: value}}} of the runs that are finite there."""
    found = {}
    for place, mixer, seed, value in hypotheses.values(rows, measure).itertuples(index=False):
        own = found.setdefault(place, {}).setdefault(mixer, {})
        own |= {} if math.isnan(value) else {seed: value}
    return found


def compared(question, rows):
    (found,) = hypotheses.differences([(question, rows)])
    return found


def row(mixer, seed, score, comparison="p", **more):
    known = {"trial": False, "steps": 100, "reached": None, "loss": 0.5, "by_length": {}}
    return known | {"mixer": mixer, "seed": seed, "score": score, "comparison": comparison} | more


def question(measure="score", test="t", pairs=(("a", "b"),)):
    names = tuple((mixer, mixer) for mixer in sorted({mixer for pair in pairs for mixer in pair}))
    return Question("Q?", names, pairs, measure, test)


# --- the plan's file -------------------------------------------------------------------------------------------------
def test_a_plan_is_the_options_of_compare_and_a_question(tmp_path):
    (path := tmp_path / "mine.yaml").write_text(PLAN, encoding="utf-8")
    study = planned(path)
    a, b, c, d = study.plans[0].mixers
    assert (study.name, a, d) == ("mine", "retnet(heads.expand_v=1)", "softmax-gla(heads.expand_v=1)")
    assert study.question.pairs == ((b, a), (d, c)) and study.question.name(d) == "gla softmax"
    assert [(p.task.pairs, p.recipe.steps, p.seed_numbers) for p in study.plans] == [(2, 7, (1, 2)), (4, 7, (1, 2))]
    assert study.plans[0].tuning == Tuning("lr", (1e-3, 1e-2), (8, 9))
    assert Question.stored({"study": json.loads(json.dumps(study.to_json()))}) == study.question


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps: 7", "setps: 7", "sets 'setps', which is no option; the nearest is 'steps'"),
        (
            "softmax - none",
            "softmax - nothing",
            "'softmax - nothing' under `compare`; expected NAME - NAME",
        ),
        ("softmax - none", "softmax", "expected NAME - NAME"),
        ("question: Does it help?", "", "lacks 'question'; expected question, mixers and compare"),
        ("compare: [softmax - none]", "compare: []", "nothing under `compare`"),
        ("measure: capacity", "measure: size", "measure='size' is not allowed; expected one of score, losses, speed"),
        ("tune_seeds: 8-9", "tune_seeds: 2-3", "seed 2 is among those of the search and those reported"),
        ("tune: lr=1e-3,1e-2", "tune: heads=3", "expected FIELD=VALUE,VALUE,… with a field such as lr"),
        ("tune: lr=1e-3,1e-2", "", "--tune-seeds 8-9 needs a search"),
        ("task: pair(least=1)", "task: pair", "measure: capacity, but the task pair is tested at one length"),
    ],
)
def test_a_wrong_plan_is_refused(old, new, says, tmp_path):
    (path := tmp_path / "mine.yaml").write_text(PLAN.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError) as error:
        for plan in planned(path).plans:
            plan.check()
    assert says in str(error.value)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_plan_of_ours_can_be_run(path):
    study = planned(path)
    for plan in study.plans:
        if isinstance(plan.task, Text):  # of files that benchmarks/corpus.py writes; here, of the standard library
            plan = replace(plan, task=replace(plan.task, files=(), tokenizer=None))
        plan.check()
    text = isinstance(study.plans[0].task, Text)  # whose losses differ less between seeds than a recall does
    assert study.question.cost and len(study.plans[0].seed_numbers) >= (3 if text else 5)
    assert study.question.measure != "capacity" or all(plan.task.by_length(1) for plan in study.plans)


# --- the search ------------------------------------------------------------------------------------------------------
def test_a_search_is_on_other_seeds_and_every_mixer_takes_its_best():
    (plan,) = choose("pair", [], None, {"seeds": "3-4"}, None, "lr=1e-3, 1e-2").plans
    assert plan.tuning == Tuning("lr", (1e-3, 1e-2), (5, 6, 7))
    assert [(t.name, t.recipe.lr, t.seed_numbers) for t in plan.trials()] == [
        ("pair-lr-0.001", 1e-3, (5, 6, 7)), ("pair-lr-0.01", 1e-2, (5, 6, 7)),
    ]  # fmt: skip
    losses = {
        "a": [(3.0, 2.0, 4.0), (1.0, 20.0, 2.5)],
        "b": [(1.0, 1.0, 1.0), (2.0, None, 2.0)],
        "c": [(None,), (None,)],
    }
    trials = [
        {"comparison": trial.name, "mixer": mixer, "scores": {} if loss is None else {"loss": loss}}
        for mixer, by_value in losses.items()
        for trial, own in zip(plan.trials(), by_value, strict=True)
        for loss in own
    ]
    assert best(plan, trials) == {"a": 1e-2, "b": 1e-3, "c": 1e-3}, "medians 3 and 2.5, 1 and 2, and none"
    assert at_edge((1, 2, 3), 3) and at_edge((1, 2, 3), 1) and not at_edge((1, 2, 3), 2)


@pytest.mark.parametrize("task", ["pair(least=8)", "digits"])
def test_a_search_is_evaluated_on_rows_that_are_not_reported(task):
    if task == "digits":
        pytest.importorskip("sklearn", reason="the extra [eval] is not installed")
    (plan,) = choose(task, [], None, {"held_out": 1024}, None, "lr=1e-3, 1e-2").plans
    rows = [Curve(of.arms()[0], lambda *news: None).held_out["input_ids"] for of in (*plan.trials(), plan)]
    first, second, reported = ({tuple(row) for row in ids.flatten(1).tolist()} for ids in rows)
    assert first == second and not first & reported and min(len(first), len(reported)) > 100


def test_reported_arms_train_with_the_value_that_was_taken_and_a_finished_study_is_kept(tmp_path):
    asked = question(pairs=(("softmax-retnet", "retnet"),))
    study = Study("s", "S", (SMALL,), question=asked)
    claim(tmp_path, study.to_json())
    heard = []
    results = complete(study, tmp_path, lambda *news: heard.append(news), ["cpu"])
    assert {(arm["mixer"], arm["seed"]) for arm in results["arms"]} == {(m, s) for m in SMALL.mixers for s in (3, 5)}
    assert [(arm["seed"], arm["lr"]) for arm in results["trials"]] == [(7, 1e-3)] * 2 + [(7, 1e-1)] * 2
    taken = results["tuned"]["small"]
    by_value = {(t["mixer"], t["lr"]): t["scores"]["loss"] for t in results["trials"]}
    for mixer in SMALL.mixers:
        assert taken[mixer] == min((1e-3, 1e-1), key=lambda lr, mixer=mixer: by_value[mixer, lr])
    assert {(arm["mixer"], arm["lr"]) for arm in results["arms"]} == set(taken.items())
    page = write_report(results, tmp_path).read_text("utf-8")
    assert (
        "small: search" in page
        and "neither these seeds nor these rows are reported" in page
        and "The statistic of the plan" in page
    )
    found = table.read(tmp_path / "runs.csv")
    assert found == [{name: r[name] for name in table.COLUMNS} for r in table.rows(results)]
    assert [r["trial"] for r in found] == [True] * 4 + [False] * 4
    assert [r["score"] for r in found[4:]] == [arm["scores"]["accuracy"] for arm in results["arms"]]
    heard.clear()
    assert complete(study, tmp_path, lambda *news: heard.append(news), ["cpu"])["arms"] == results["arms"]
    assert all(step == SMALL.recipe.steps for _, step, _ in heard), "nothing was trained again"


def test_an_arm_begins_with_the_weights_of_one_without_gates(tmp_path):
    heard, apart = [], replace(SMALL, seeds=(3,), tuning=None)
    plain, gated = apart.arms()
    weights = train(plain, tmp_path / "plain.json", lambda step, scores: heard.append(scores)).state_dict()
    train(gated, tmp_path / "gated.json", lambda step, scores: heard.append(scores), weights=weights)
    before, after = heard[: len(heard) // 2], heard[len(heard) // 2 :]
    assert after[0] == before[-1] != before[0], "its gates begin at 1"
    assert after[-1]["loss"] < after[0]["loss"]
    with pytest.raises(AssertionError, match="o_proj"):
        begin(build(gated), {name: value for name, value in weights.items() if "o_proj" not in name})


# --- the statistic ---------------------------------------------------------------------------------------------------
def test_differences_are_paired_and_corrected_over_the_family():
    a, b, c = (0.9, 0.8, 0.95), (0.5, 0.6, 0.65), (0.7, 0.9, 0.6)
    runs = [row(m, s, x) for m, own in zip("abc", (a, b, c), strict=True) for s, x in enumerate(own)]
    runs += [row("a", 9, 0.0), row("a", 1, 0.0, trial=True), row("b", 3, None)]  # unpaired, of a search, diverged
    first, second = compared(question(pairs=(("a", "b"), ("a", "c"))), runs)
    by_scipy, other = stats.ttest_rel(a, b), stats.ttest_rel(a, c)
    interval = by_scipy.confidence_interval(0.95)
    assert (first.where, first.gain.n) == ("p", 3) and first.gain.value == pytest.approx(0.3)
    assert first.gain.interval == pytest.approx(tuple(interval)) and first.p == pytest.approx(by_scipy.pvalue)
    assert first.corrected == pytest.approx(2 * by_scipy.pvalue) and second.corrected == pytest.approx(other.pvalue)
    (wilcoxon,) = compared(question(test="wilcoxon"), runs)
    assert wilcoxon.p == stats.wilcoxon([0.4, 0.2, 0.3]).pvalue


def test_holm_by_hand():
    assert ours.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])  # 3 · 0.01, 2 · 0.03, and no less
    assert ours.holm([0.9, 0.6]) == [1.0, 1.0] and ours.holm([]) == []


@pytest.mark.parametrize("test", ["t", "wilcoxon"])
@pytest.mark.parametrize(
    ("gains", "p", "verdict"),
    [([0.5], 1, "too few seeds"), ([0.5] * 2, 1 / 2, "too few seeds"), ([0.0] * 3, 1, "not told apart"),
     ([-0.5] * 5, 1 / 16, "not told apart"), ([0.5] * 6, 1 / 32, "more"), ([-0.5] * 6, 1 / 32, "less")],
)  # fmt: skip
def test_equal_differences_are_judged_by_their_signs(test, gains, p, verdict):
    """p is exact: two of 2^n choices of signs are as extreme. Sums such as 0.43 + 0.5 are rounded, each in its way."""
    bases = [0.43, 0.51, 0.07, 0.3, 0.9, 0.11]
    runs = [row(m, s, base + x) for s, (gain, base) in enumerate(zip(gains, bases, strict=False)) for m, x in
            (("a", gain), ("b", 0))]  # fmt: skip
    (found,) = compared(question(test=test), runs)
    assert (found.p, found.verdict) == (pytest.approx(p), verdict)
    if p > 1 / 20:
        assert found.gain.interval == (-math.inf, math.inf)
        assert hypotheses.table(question(test=test), [found])[1][3] == "no interval"
    else:
        assert found.gain.interval == pytest.approx((gains[0],) * 2)


def test_two_seeds_are_too_few_for_a_verdict():
    """Even where p is small."""
    runs = [row(m, s, x) for s, gain in enumerate((0.5, 0.501)) for m, x in (("a", 0.1 + gain), ("b", 0.1))]
    (found,) = compared(question(), runs)
    assert found.corrected < 0.001 and found.verdict == "too few seeds"


def test_runs_of_equal_models_that_learn_or_do_not_are_told_apart_in_one_of_twenty_at_most():
    """Scores of 0 or 1 by the toss of a coin, all 4^n of n seeds. With two seeds, 1 in 8 would favour one model."""
    for n in (2, 3, 4, 5, 6):
        verdicts = []
        for scores in product((0.0, 1.0), repeat=2 * n):
            gains = [a - b for a, b in zip(scores[:n], scores[n:], strict=True)]
            one = hypotheses.Tested("", "a", "b", ours.mean_over_seeds(gains), ours.paired(gains))
            verdicts.append(replace(one, corrected=one.p).verdict in ("more", "less"))
        assert fmean(verdicts) <= 0.05, n


def test_seeds_that_diverged_are_marked():
    runs = [row(m, s, x) for m, base in (("a", 0.5), ("b", 0.2)) for s, x in enumerate((base, base + 0.1, base + 0.3))]
    runs += [row("a", 3, None), row("b", 3, 0.3), row("c", 0, None), row("c", 1, None), row("a", 4, None, trial=True)]
    asked = question(pairs=(("a", "b"), ("c", "b")))
    found = compared(asked, runs)
    assert [one.lost for one in found] == [1, 2] and [one.gain.n for one in found] == [3, 0]
    assert [cells[1] for cells in hypotheses.table(asked, found)[1:]] == ["3 of 4", "0 of 2"]
    assert "3 of 4 seeds" in hypotheses.answer(asked, found)
    means = {cells[0]: cells[1:3] for cells in hypotheses.table_of_means(asked, runs)[1:]}
    assert means["a"] == ["3 of 4", "0.633 ± 0.153"] and means["b"][0] == "4" and means["c"] == ["0 of 2", "diverged"]
    none = [row(m, s, None) for m in "ab" for s in range(2)]
    said = hypotheses.answer(question(), compared(question(), none))
    assert said == "Q? a and b have no seed in which neither diverged."


def test_studies_that_are_shown_together_are_one_family():
    runs = [row(m, s, x) for m, own in (("a", (0.9, 0.8, 0.95)), ("b", (0.5, 0.6, 0.65))) for s, x in enumerate(own)]
    alone, (first, second) = compared(question(), runs), hypotheses.differences([(question(), runs)] * 2)
    assert first == second and first[0].corrected == pytest.approx(2 * alone[0].corrected)


def test_the_length_held_is_interpolated_and_stays_on_the_grid():
    runs = [
        row("a", 0, 0.9, by_length={8: 1.0, 16: 0.95, 32: 0.75, 64: 0.95}),
        row("b", 0, 0.9, by_length={8: 0.9, 16: 0.9}),
        row("b", 1, 0.9, by_length={8: 0.89, 16: 1.0}),
    ]
    broken = row("c", 0, 0.9, by_length={8: 1.0, 16: 0.95, 32: math.nan, 64: 0.95})
    assert hypotheses.length_held(broken) == 4.0, "what is not finite is not held"
    by_mixer = collected(runs, "capacity")["p"]
    assert by_mixer["a"][0] == pytest.approx(4.25), "a quarter of the way from 0.95 to 0.75; what comes later is luck"
    assert by_mixer["b"] == {0: 4.0, 1: 3.0}
    cells = hypotheses.table_of_means(question("capacity"), runs)
    assert cells[1:] == [["a", "1", "19 (19 to 19)", "0"], ["b", "2", "11 (7 to 18)", "2"]]


def test_a_loss_that_is_not_finite_is_a_seed_that_is_lost():
    lengths = [{8: 2.0, 64: 3.0}, {8: 2.0, 64: math.nan}, {8: 2.0, 64: 3.5}]
    runs = [row("a", seed, 2.0, loss=2.0, scores={}, by_length=own) for seed, own in enumerate(lengths)]
    assert collected(runs, "losses")["p, rows of 64"] == {"a": {0: 3.0, 2: 3.5}}
    cells = {row[1]: row[2] for row in hypotheses.table_of_means(question("losses"), runs)}
    assert (cells["p, rows of 64"], cells["p, rows of 8"]) == ("2 of 3", "3")


def test_losses_are_compared_over_all_tokens_over_repeats_and_by_length():
    scores = {"loss": 2.0, "perplexity": 7.4, "loss on repeats": 1.0}
    runs = [row("a", 0, 2.0, loss=2.0, scores=scores, by_length={8: 2.5, 1024: 3.0})]
    assert collected(runs, "losses") == {
        f"p, {place}": {"a": {0: value}}
        for place, value in {"all tokens": 2.0, "loss on repeats": 1.0, "rows of 8": 2.5, "rows of 1,024": 3.0}.items()
    }


def test_speed_is_the_first_evaluation_above_nine_tenths():
    arm = {"mixer": "a", "diverged": False, "scores": {"accuracy": 0.95, "loss": 0.2}, "curve": [
        {"step": s, "scores": {"accuracy": x, "loss": 1 - x}} for s, x in ((0, 0.1), (10, 0.9), (20, 0.8), (30, 0.95))
    ]}  # fmt: skip
    found = table.row(arm, Pair.metric, False)
    assert (found["reached"], found["score"], found["loss"]) == (10, 0.95, 0.2)
    assert table.row(arm, Text.metric, False)["reached"] is None
    never = table.row(arm | {"curve": arm["curve"][:1]}, Pair.metric, False)
    assert never["reached"] is None
    runs = [row("a", 0, 0.9, reached=30), row("b", 0, 0.5)]
    assert collected(runs, "speed") == {"p": {"a": {0: 30.0}, "b": {0: 100.0}}}


def test_a_planned_report_judges_nothing_that_the_plan_does_not_ask():
    from test_findings import results

    from headrace.studies.compare.findings import findings
    from headrace.studies.compare.summary import summarise

    found = results([[0.5, 0.6, 0.7], [0.8, 0.9, 0.98], [0.7, 0.8, 0.9]], plan=replace(SMALL, seeds=3, tuning=None,
        mixers=("retnet", "softmax-retnet", "softmax-retnet(competition.activation=sigmoid)")))  # fmt: skip
    (comparison,) = summarise(found)
    assert any("better than" in sentence for sentence in findings(comparison))
    assert not any(
        "better than" in sentence or "clear difference" in sentence for sentence in findings(comparison, True)
    )


def test_the_figures_of_the_demo_are_those_of_its_runs():
    root = Path(__file__).parents[2]
    runs = table.read(root / "benchmarks" / "results" / "studies" / "demo.csv")
    by_mixer = collected(runs, "score")["pair"]
    said = [" ".join((root / name).read_text("utf-8").split()) for name in ("README.md", "docs/limits.md")]
    for values in by_mixer.values():
        percent = f"{100 * fmean(values.values()):.1f} ± {100 * stdev(values.values()):.1f} %"
        assert all(percent in text for text in said), percent
    plain, softmax = by_mixer["linear-attention"], by_mixer["softmax-linear-attention"]
    gains = [100 * (softmax[seed] - plain[seed]) for seed in plain]
    low, high = stats.ttest_1samp(gains, 0).confidence_interval(0.95)
    assert f"{fmean(gains):.1f} points, 95 % interval {low:.1f} to {high:.1f})" in said[0]
