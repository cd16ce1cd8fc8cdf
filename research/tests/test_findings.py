"""What the findings conclude from the rows of the studies, whatever their sentences say; and how defaults were chosen.
The numbers of the pages are generated: test_generated.py."""

import json
import math
from itertools import groupby
from statistics import fmean, median

import pytest
from scipy import stats as by_scipy

from benchmarks import record
from headrace.comparison import hypotheses
from headrace.comparison.defaults import DEFAULTS, DEMO
from headrace.comparison.rows import read
from headrace.training import recipes
from research import RESULTS, generated, power, rates, sentences, study, taylor


def reported(name):
    asked, runs = study.read(name)
    return [row | {"arm": asked.name(row["mixer"])} for row in runs if not row["trial"]]


def values(name):
    """{arm: its values} of a study with one place."""
    (own,) = study.by_arm(name).values()
    return {arm: column.tolist() for arm, column in own.items()}


# --- studies of competition ------------------------------------------------------------------------------------------
FOUR_TIMES, DISTRACTORS = sentences.GROUPS["four-times"], sentences.GROUPS["two-distractors"]
SETTINGS = sentences.GROUPS["settings"]


def test_every_stored_study_is_shown():
    shown = {word for page in generated.pages() for word in page.read_text("utf-8").split()}
    kept = {path.stem for path in (RESULTS / "studies").glob("*.csv")} - {"demo"}
    assert kept <= shown


@pytest.mark.parametrize(
    ("a", "b", "names", "where", "seeds"),
    [
        ("softmax", "wide sigmoid", sentences.GROUPS["backbones"], None, 5),
        ("softmax", "wide sigmoid", sentences.GROUPS["all-texts"], "text, all tokens", 10),
    ],
)
def test_differences_over_several_studies_count_a_seed_once(a, b, names, where, seeds):
    """Runs of several studies on one seed read the same rows."""
    by_seed = {}
    for places in map(study.by_arm, names):
        own = places[where or next(iter(places))]
        for seed, gain in (own[a] - own[b]).items():
            by_seed.setdefault(seed, []).append(gain)
    gains = list(map(fmean, by_seed.values()))
    mean, p = study.pooled(a, b, names, where)
    t_test = by_scipy.ttest_1samp(gains, 0)
    assert (mean.n, mean.value, p) == (seeds, pytest.approx(fmean(gains)), pytest.approx(t_test.pvalue))
    assert mean.interval == pytest.approx(tuple(t_test.confidence_interval(0.95)))
    assert study.pooled(a, b, names * 2, where)[1] == pytest.approx(p), "no surer by its runs twice"


def test_the_tables_of_effects_have_the_statistic_of_their_studies():
    found = sentences.differences("clusters")
    for setting, prefix in zip(study.settings(["clusters"]), ("retnet ", "linear-attention "), strict=True):
        assert setting.name == f"{prefix.strip()}, keys in clusters"
        gains = {(a, b): study.effect(setting.arms, a, b) for a, b in study.EFFECTS}
        assert gains == {(a, b): found[prefix + a, prefix + b].mean for a, b in study.EFFECTS}
    cells = {
        row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in study.others_of(["mqar-retnet", "text-gla"])
    }
    gain = sentences.differences("mqar-retnet")["softmax", "none"].mean
    assert cells["mqar-retnet, steps to 90 %"][3] == study.cell(gain, 0)
    losses = [row["loss"] for row in reported("text-gla") if row["arm"] == "none"]
    assert cells["text-gla, all tokens"][0] == f"{fmean(losses):.3f}"


def test_the_picture_of_effects_shows_them():
    settings, (panel, *_) = study.settings(["clusters"])[::-1], study.effects_picture(["clusters"]).axes
    (bar,) = panel.containers
    expected = [study.effect(setting.arms, "softmax", "none").value for setting in settings]
    assert list(bar.lines[0].get_xdata()) == pytest.approx(expected)
    assert [label.get_text() for label in panel.get_yticklabels()] == [setting.name for setting in settings]


def test_what_remains_after_correction_is_of_gates_against_none():
    studies = [study.read(name) for name in SETTINGS]
    assert [
        (name, one.a, one.b)
        for name, own in zip(SETTINGS, hypotheses.differences(studies), strict=True)
        for one in own
        if one.verdict != "not told apart"
    ] == [
        ("capacity-linear-attention", "softmax", "none"), ("capacity-linear-attention", "softmax read", "none"),
        ("long-retnet", "wide sigmoid", "none"), ("heads-32", "softmax", "none"), ("heads-32", "wide sigmoid", "none"),
        ("clusters", "retnet softmax", "retnet none"), ("clusters", "retnet wide sigmoid", "retnet none"),
    ]  # fmt: skip


def test_competition_is_nowhere_better_than_its_control():
    gains = [study.effect(setting.arms, "softmax", "wide sigmoid") for setting in study.settings(SETTINGS)]
    assert all(gain.interval[0] <= 0 for gain in gains)
    gates = sentences.differences("gates-retnet")
    assert len(gates) == 7 and {one.verdict for one in gates.values()} == {"not told apart"}
    assert min(gates, key=lambda pair: gates[pair].mean.value)[0] == "unscaled"


def test_one_of_two_plans_on_four_times_the_state_tells_the_gates_apart_and_no_run_is_at_a_bound():
    first, second = (list(sentences.differences(name).values()) for name in FOUR_TIMES)
    assert (first[1].verdict, {one.verdict for one in second}, second[1].corrected) == ("less", {"not told apart"}, 1)
    for row in (row for name in FOUR_TIMES for row in reported(name)):
        assert hypotheses.length_held(row) not in hypotheses.bounds("capacity", row)


def test_learning_rates_of_second_plans_are_not_the_smallest():
    rate = {name: {row["arm"]: row["lr"] for row in reported(name)} for name in (*FOUR_TIMES, *DISTRACTORS)}
    assert set(rate["capacity-large"].values()) == {3e-3}
    assert rate["distractors"]["none"] == rate["distractors"]["softmax"] == 3e-3 < rate["distractors"]["wide sigmoid"]
    for name, wide in (("capacity-large-rates", 3e-3), ("distractors-rates", 1e-2)):
        assert rate[name] == {"none": 3e-3, "softmax": 1e-2, "wide sigmoid": wide}
        trials = {(row["mixer"], row["lr"]): row["score"] for row in study.read(name)[1] if row["trial"]}
        assert all(trials[arm, 1e-3] == min(trials[arm, lr] for lr in (1e-3, 3e-3, 1e-2)) for arm, _ in trials)


def test_retnet_holds_the_fewest_pairs_of_overwritten_values():
    retnet = [row for row in reported("overwritten") if row["arm"].startswith("retnet")]
    held = [2 ** hypotheses.length_held(row) / study.positions("overwritten") for row in retnet]
    assert held == pytest.approx([4] * 15), "the fewest pairs"


def test_a_quarter_of_the_state_holds_few_pairs():
    assert all(2 ** fmean(own) / 2 < 5 for own in values("capacity-small").values())


@pytest.mark.parametrize(
    ("name", "count"),
    [("capacity-deltanet", "0 of 20"), ("capacity-gated-deltanet", "0 of 20"), ("retrofit", "0 of 15")],
)
def test_no_run_of_a_delta_rule_or_of_late_gates_has_converged(name, count):
    assert study.converged(name) == count


@pytest.mark.parametrize(
    ("name", "arm", "pairs"),
    [
        ("capacity-linear-attention", "softmax read", 32), ("long-retnet", "wide sigmoid", 32),
        ("heads-32", "softmax", 48), ("heads-32", "wide sigmoid", 48),
    ],
)  # fmt: skip
def test_all_five_seeds_hold_the_most_that_was_tested(name, arm, pairs):
    assert [2**value / study.positions(name) for value in values(name)[arm]] == pytest.approx([pairs] * 5)


def test_all_seeds_hold_the_most_in_clusters_at_twice_the_width():
    own = study.by_arm("clusters-width")["pair-hidden_size-64"]
    gains = {f"{study.effect(own, f'retnet {arm}', 'retnet none').value:+.2f}" for arm in ("softmax", "wide sigmoid")}
    assert gains == {"+0.31"}, "with the wide sigmoid as much"
    assert (2 ** own["retnet softmax"] / study.positions("clusters-width")).tolist() == pytest.approx([32] * 5)


def test_only_in_linear_attention_the_softmax_learns_in_fewer_steps():
    named = {a: one for (a, b), one in sentences.differences("speed").items() if b.endswith("none")}
    assert named.pop("linear-attention softmax").verdict == "less"
    assert {one.verdict for one in named.values()} == {"not told apart"} and len(named) == 4


def test_no_difference_on_text_stands_after_correction():
    for name in sentences.GROUPS["texts"]:
        (found,) = hypotheses.differences([study.read(name)])
        assert {one.verdict for one in found} == {"not told apart"} and len(found) >= 8


def test_first_weights_of_the_gates_change_nothing_that_is_told_apart():
    zeros, *others = study.by_arm("gate-start").values()
    assert study.plan("gate-start").sweep["values"] == [0, 0.02, 1]
    for own in others:
        for arm in ("published", "softmax"):
            low, high = by_scipy.ttest_1samp(own[arm] - zeros[arm], 0).confidence_interval()
            assert low < 0 < high


def test_gates_on_digits_took_the_largest_rate():
    assert {row["lr"] for row in reported("digits") if row["arm"] in ("wide sigmoid", "softmax")} == {0.03}


WORD_PERPLEXITIES = {  # table 4 of arXiv 2602.01744: without and with competition
    "text-retnet": (29.58, 27.79), "text-gla": (28.93, 26.32), "text-gated-deltanet": (24.22, 23.99),
}  # fmt: skip


@pytest.mark.parametrize("name", WORD_PERPLEXITIES)
def test_which_gains_of_the_paper_s_size_the_texts_exclude(name):
    without, competing = WORD_PERPLEXITIES[name]
    gain = math.log(without / competing) / 5.350 * bytes_of_a_token(name)
    (cells,) = (line.strip("| ").split(" | ") for line in power.lines() if line.startswith(f"| {name} |"))
    own = study.by_arm(name)["text, all tokens"]
    low = by_scipy.ttest_1samp(own["softmax"] - own["none"], 0).confidence_interval().low
    assert cells[4] == f"−{gain:.3f}"
    assert cells[5] == ("yes" if low > -gain else "no") == ("yes" if name == "text-gla" else "no")


def bytes_of_a_token(name):
    row = json.loads(record.read(study.kept(name))[0]["scores"])
    return row["loss"] / math.log(2) / row["bits per byte"]


def test_the_published_form_on_text_is_judged_once_its_rows_are_kept(tmp_path, monkeypatch):
    """By rows of text-gla, whose wide sigmoid stands in for the published form, with its read gate and without."""
    forms = {"gla(competition=sigmoid)": ("paper-softmax-gla", "paper-softmax-gla(competition.read=none)")}
    runs = record.read(study.kept("text-gla"))
    renamed = [row | {"mixer": form} for row in runs for form in forms.get(row["mixer"], (row["mixer"],))]
    made, kept = tmp_path / "text-published.csv", study.kept
    monkeypatch.setattr(study, "kept", lambda name: made if name == "text-published" else kept(name))
    assert "has not been trained on text" in generated.published_text()
    assert len(power.judged()) == 3 and not any("published" in line for line in power.lines())
    record.append(made, {}, renamed)
    arms = study.by_arm("text-gla")["text, all tokens"]
    gain = study.effect(arms, "wide sigmoid", "none")
    said = generated.published_text()
    assert sentences.stated(gain, 3) in said and "without its read gate it is +0.000" in said
    size = math.log(28.93 / 26.32) / 5.350 * bytes_of_a_token("text-gla")
    excludes = gain.interval[0] > -size
    assert ("which excludes" if excludes else "does not exclude") + f" the paper's gain of {size:.3f}" in said
    (line,) = (line for line in power.lines() if line.startswith("| text-published |"))
    assert "`paper-softmax-gla`" in line and line.endswith("| yes |" if excludes else "| no |")
    assert generated.study_if_kept("text-published").startswith("Does the published form lower GLA's loss on text")


def test_the_curves_of_denominators_and_orders_order_as_the_page_tells():
    lines = (line.strip("| ").split(" | ") for line in taylor.lines()[2:])
    loss, spread = {}, {}
    for label, cell in lines:
        loss[label], *spread[label] = map(float, cell.split(" ± "))
    orders = [loss[f"order {n}"] for n in (1, 2, 4, 10)]
    assert orders == sorted(orders, reverse=True) and loss["order 10"] - loss["e^x"] < spread["e^x"][0]
    for name in ("relu", "elu + 1"):
        orders = [loss[name], loss[f"{name}, order 2"], loss[f"{name}, order 10"], loss["softmax attention"]]
        assert orders == sorted(orders, reverse=True)
    assert loss["elu + 1, order 10"] < loss["relu, order 10"]
    assert min(loss["cosine, order 2"], loss["cosine, order 10"]) > loss["cosine"]
    whole, length = loss["softmax attention"], loss["length alone"]
    assert abs(loss["L2 norm"] - whole) < 2 * spread["softmax attention"][0]
    assert min(loss["detached sum"], loss["detached sum and length"], length) > whole + 0.15
    assert all(whole + 0.1 < loss[f"{gate} and length"] < length for gate in ("gate", "input gate"))
    assert loss["L2 norm and length"] == loss["L2 norm"] < min(loss["RMS norm"], loss["layer norm"]) - 0.1


def test_the_demo_s_rows_are_of_today_s_demo():
    rows = read(RESULTS / "studies" / "demo.csv")
    ran = {(row["comparison"], row["mixer"], row["seed"], row["steps"], row["lr"]) for row in rows}
    assert ran == {
        (arm.plan.name, arm.mixer, arm.seed, arm.plan.recipe.steps, arm.plan.recipe.lr) for arm in DEMO.arms()
    }


# --- defaults --------------------------------------------------------------------------------------------------------
RUNS = read(RESULTS / "defaults.csv")
SEARCHED = [run for run in RUNS if "-lr-" in run["comparison"]]
BY_DEFAULT = {task: list(own) for task, own in groupby(
    (run for run in RUNS if run["comparison"] in DEFAULTS), lambda run: run["comparison"])}  # fmt: skip
TASKS = list(dict.fromkeys(run["comparison"].partition("-lr-")[0] for run in SEARCHED))


def test_every_default_is_searched_and_reported_on_other_seeds():
    """`pair` and `text` are searched by their studies, and `pair` is reported by them."""
    assert {*BY_DEFAULT, "pair"} == {*TASKS, "pair", "text"} == DEFAULTS.keys()
    for task, runs in BY_DEFAULT.items():
        plan = DEFAULTS[task]
        assert tuple(run["mixer"] for run in runs) == plan.mixers
        assert {(run["steps"], run["lr"], run["seed"]) for run in runs} == {(plan.recipe.steps, plan.recipe.lr, 0)}
    seeds = {run["seed"] for run in SEARCHED}
    assert all(seeds.isdisjoint(plan.seed_numbers) for plan in DEFAULTS.values())


@pytest.mark.parametrize("task", TASKS)
def test_a_default_takes_the_rate_with_the_lowest_sum_of_losses(task):
    """Of the medians over seeds, at the rates that every mixer of the search was trained with."""
    losses = {}
    for run in (run for run in SEARCHED if run["comparison"].startswith(f"{task}-lr-")):
        losses.setdefault(run["lr"], {}).setdefault(run["mixer"], []).append(run["loss"])
    mixers = max(map(len, losses.values()))
    sums = {rate: sum(map(median, own.values())) for rate, own in losses.items() if len(own) == mixers}
    assert len(sums) > 1 and DEFAULTS[task].recipe.lr == min(sums, key=sums.__getitem__)


@pytest.mark.parametrize("recipe", ["laptop-1m", "laptop-5m"])
def test_a_recipe_takes_the_rate_with_the_lowest_sum_of_losses(recipe):
    """At the recipe's own tokens a step, and at the rates that all its mixers were trained with."""
    own, _ = recipes.load(recipe)
    tried = [losses for key, losses in rates.losses().items() if key[0] == recipe and key[3] == own.batch_tokens]
    common = set.intersection(*map(set, tried))
    assert len(common) > 2 and own.lr == min(common, key=lambda rate: sum(losses[rate] for losses in tried))


def test_smaller_step_sizes_of_gated_deltanet_find_needles():
    """Its own find no needle at three rates; smaller ones half of them, and with twice the steps 126 of 128."""
    smaller = "gated-deltanet(decay.dt_min=1e-5, decay.dt_max=1e-3)"
    needles = (run for run in RUNS if run["comparison"].startswith("needle"))
    score = {(run["mixer"], run["steps"], run["lr"]): run["score"] for run in needles}
    assert [score["gated-deltanet", 1000, lr] for lr in (3e-4, 1e-3, 3e-3)] == [0] * 3
    assert (score[smaller, 1000, 1e-3], score[smaller, 2000, 1e-3]) == (0.5, 126 / 128)


def test_runs_are_paired_by_their_seed_and_not_by_their_place():
    assert sentences.gains({0: 1.0, 1: 5.0}, {1: 2.0, 0: 4.0}) == [-3.0, 3.0]
    with pytest.raises(ValueError, match=r"seeds \[0\] cannot be paired with \[1\]; expected the same"):
        sentences.gains({0: 1.0}, {1: 1.0})
