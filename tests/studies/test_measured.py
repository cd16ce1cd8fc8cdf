"""The figures of the pages are those of the rows that the benchmarks wrote."""

import csv
import math
import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
from scipy import stats

import specialisation
import study
import taylor
from headrace.studies.compare import hypotheses

ROOT = Path(__file__).parents[2]


def collected(rows, measure):
    """{place: {mixer: {seed: value}}} of the runs that are finite there."""
    found = {}
    for place, mixer, seed, value in hypotheses.values(rows, measure).itertuples(index=False):
        own = found.setdefault(place, {}).setdefault(mixer, {})
        own |= {} if math.isnan(value) else {seed: value}
    return found


LOADS = {  # a row of the page -> the load of the benchmark's row
    "1 stream": "1 stream",
    "8 streams": "8 streams",
    "64 streams": "64 streams",
    "200 streams": "200 streams",
    "a short prompt alone": "a prompt alone",
    "the same beside a prompt of 50,000 tokens": "beside a prompt of 50,000 tokens",
    "1,000 requests, 64 at a time": "1,000 requests",
}


def rows(name):
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cells(page, first):
    """The cells of the page's table row that begins with `first`."""
    (line,) = (
        line for line in (ROOT / "docs" / page).read_text("utf-8").splitlines() if line.startswith(f"| {first} |")
    )
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def shown(*values):
    return ", ".join(f"{float(value):,.0f}" for value in values if value)


@pytest.mark.parametrize(("first", "load"), LOADS.items())
def test_the_server(first, load):
    row = [row for row in rows("serving") if row["load"] == load and row["server"] == "headrace"][-1]
    wanted = [row["tokens_per_second"]], [row["first_p50"], row["first_p99"]], [row["next_p50"], row["next_p99"]]
    assert cells("serving.md", first) == [*(shown(*values) for values in wanted), shown(row["memory"])]


def test_the_studies():
    """The page has the tables of every study that is kept, once, below the command that prints them."""
    page = (ROOT / "docs" / "competition.md").read_text("utf-8")
    commands = re.findall(r"^python benchmarks/study.py show (.*)$", page, re.MULTILINE)
    assert re.findall(r"^<!-- generated: study (.*) -->$", page, re.MULTILINE) == commands
    kept = {path.stem for path in (ROOT / "benchmarks" / "results" / "studies").glob("*.csv")} - {"demo"}
    assert sorted(name for names in commands for name in names.split()) == sorted(kept)


@pytest.mark.parametrize(("name", "page"), [("specialisation", "competition"), ("taylor", "taylor")])
def test_the_programs_of_studies(name, page):
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert f"\npython benchmarks/{name}.py show\n```\n\n<!-- generated: program {name} -->\n" in text


def test_what_the_curves_of_denominators_and_orders_tell():
    """The sentences of docs/taylor.md, of the means over seeds."""
    rows = (line.strip("| ").split(" | ") for line in taylor.lines()[2:])
    found = {label: [float(number) for number in loss.split(" ± ")] for label, loss in rows}
    loss = {label: mean for label, (mean, _) in found.items()}
    orders = [loss[f"order {n}"] for n in (1, 2, 4, 10)]
    assert orders == sorted(orders, reverse=True) and loss["order 10"] - loss["e^x"] < found["e^x"][1]
    assert loss["elu + 1, order 10"] < loss["elu + 1"] - 0.2
    assert min(loss["cosine, order 2"], loss["cosine, order 10"]) > loss["cosine"]
    whole, length = loss["softmax attention"], loss["length alone"]
    assert abs(loss["L2 norm"] - whole) < 2 * found["softmax attention"][1]
    assert min(loss["detached sum"], loss["detached sum and length"], length) > whole + 0.15
    assert all(0 < length - loss[f"{gate} and length"] < 0.05 for gate in ("gate", "input gate"))
    assert loss["L2 norm and length"] == loss["L2 norm"] < min(loss["RMS norm"], loss["layer norm"]) - 0.1


def test_the_effects_are_the_statistic_of_the_study():
    question, runs = study.read("clusters")
    (found,) = hypotheses.differences([(question, runs)])
    tested = {(question.name(one.a), question.name(one.b)): one for one in found}
    for setting, prefix in zip(study.settings(["clusters"]), ("retnet ", "linear-attention "), strict=True):
        assert setting.name == f"{prefix}, keys in clusters".replace(" ,", ",")
        for a, b in study.EFFECTS:
            gain = study.effect(setting.arms, a, b)
            assert gain == tested[prefix + a, prefix + b].gain and gain.n == 5
    assert "| 11 | 20 | 20 | +0.85 (+0.61 to +1.10) |" in study.effects_of(["clusters"])[2]


CLAIMS = (  # differences that docs/findings.md states, as +mean (low to high)
    ("capacity-linear-attention", "softmax", "none"),
    ("capacity-linear-attention", "softmax", "sigmoid"),
    *(("heads-norm", f"{n} heads softmax", f"{n} heads none") for n in (16, 32)),
    ("heads-32", "softmax", "none"),
    ("clusters", "retnet softmax", "retnet none"),
    ("retrofit", "softmax", "none"),
    ("speed", "linear-attention softmax", "linear-attention none"),
    ("long-retnet", "softmax", "none"),
    ("long-retnet", "wide sigmoid", "none"),
    ("capacity-deltanet", "wide sigmoid", "none"),
    ("capacity-gated-deltanet", "wide sigmoid", "none"),
    ("capacity-deltanet", "softmax", "none"),
    ("capacity-gated-deltanet", "softmax", "none"),
    ("overwritten", "deltanet wide sigmoid", "deltanet none"),
    *((name, "softmax", "wide sigmoid") for name in ("capacity-large", "capacity-large-rates")),
    *((name, "softmax", "none") for name in ("distractors", "distractors-rates")),
)
MEANS = (  # pairs or steps that it states, as NAME's mean over seeds
    ("capacity-linear-attention", "none", "holds {} pairs without gates"),
    ("capacity-linear-attention", "softmax", "and {} with the softmax: +0.71"),
    ("capacity-retnet", "shuffled", "RetNet then holds {} pairs"),
    ("capacity-retnet", "none", "without gates {}. No plan"),
    ("heads-32", "none", "with 32 heads and an MLP {} pairs without gates, and all"),
    ("heads-32", "softmax", "and all {} in all five seeds with the softmax"),
    ("heads-32", "wide sigmoid", "and all {} in all five seeds with the softmax and with the wide sigmoid"),
    ("heads-retnet", "16 heads none", "16 heads and half the state RetNet holds {} pairs without gates"),
    ("heads-retnet", "16 heads softmax", "without gates, {} with the softmax"),
    ("heads-retnet", "16 heads wide sigmoid", "and {} with the wide sigmoid; with 32"),
    ("heads-norm", "16 heads none", "the 16 heads hold {} pairs without gates"),
    ("heads-norm", "16 heads softmax", "and {} with the softmax, +0.55"),
    ("heads-norm", "32 heads none", "32 heads of one value channel {} and"),
    ("heads-norm", "32 heads softmax", "one value channel 20 and {}, +0.64"),
    ("speed", "linear-attention none", "12 pairs after {} steps without gates"),
    ("speed", "linear-attention softmax", "after {} with the softmax"),
    ("speed", "linear-attention wide sigmoid", "wide sigmoid needs {} steps"),
    ("long-retnet", "none", "RetNet without gates holds {} pairs"),
    ("long-retnet", "softmax", "with the softmax {} and"),
    ("capacity-deltanet", "none", "DeltaNet holds {} pairs"),
    ("capacity-gated-deltanet", "none", "Gated DeltaNet {}"),
    ("overwritten", "deltanet none", "DeltaNet holds {} pairs without gates, 4"),
    ("overwritten", "deltanet softmax", "{} with the softmax and 9"),
    ("overwritten", "deltanet wide sigmoid", "and {} with the wide sigmoid: wide sigmoid less none is +1.11"),
)


BACKBONES = "linear-attention", "retnet", "gla", "deltanet", "gated-deltanet"
TEXTS = "text-gla", "text-retnet", "text-gated-deltanet"
FOUR_TIMES = "capacity-large", "capacity-large-rates"
DISTRACTORS = "distractors", "distractors-rates"
REPEATS = "text-repeats-gla", "text-repeats-gated-deltanet"
POOLED = (  # differences over several studies, as mean (low to high; seeds, p): the arms, studies, seeds, place, digits
    ("softmax", "wide sigmoid", (*(f"capacity-{name}" for name in BACKBONES), "gates-retnet"), 10, None, 2),
    *((a, b, names, 10, None, 2) for a, b in study.EFFECTS[1:] for names in (FOUR_TIMES, DISTRACTORS)),
    ("softmax", "wide sigmoid", TEXTS, 5, "text, loss on repeats", 3),
    ("softmax", "wide sigmoid", TEXTS, 5, "text, all tokens", 3),
    *(("softmax", "wide sigmoid", REPEATS, 5, f"text, {name}", 3) for name in ("loss on repeats", "all tokens")),
    *(
        ("softmax", "wide sigmoid", TEXTS + REPEATS, 10, f"text, {name}", 3)
        for name in ("loss on repeats", "all tokens")
    ),
)


@pytest.fixture(scope="module")
def findings():
    return " ".join((ROOT / "docs" / "findings.md").read_text("utf-8").split())


@pytest.mark.parametrize(
    ("backbone", "means"),
    [("retnet", "in RetNet {:.1f} % without gates, {:.1f} % with the softmax and {:.1f} % with the wide sigmoid"),
     ("linear-attention", "in linear attention {:.1f} %, {:.1f} % and {:.1f} %")],
)  # fmt: skip
def test_a_quarter_of_the_state(backbone, means):
    """The mean recalls that the page states, and their difference."""
    page = " ".join((ROOT / "docs" / "competition.md").read_text("utf-8").split())
    question, runs = study.read("capacity-small")
    (found,) = collected(runs, "score").values()
    scores = {question.name(mixer): own for mixer, own in found.items()}
    none, softmax, wide = (scores[f"{backbone} {arm}"] for arm in ("none", "softmax", "wide sigmoid"))
    assert means.format(*(100 * fmean(own.values()) for own in (none, softmax, wide))) in page
    interval = stats.ttest_1samp([100 * (softmax[seed] - none[seed]) for seed in none], 0).confidence_interval()
    mean = 100 * (fmean(softmax.values()) - fmean(none.values()))
    assert f"{mean:+.1f} ({interval.low:.1f} to {interval.high:.1f}) points".replace("-", "−") in page


def test_no_arm_holds_many_pairs_with_a_quarter_of_the_state():
    question, runs = study.read("capacity-small")
    (found,) = collected(runs, question.measure).values()
    assert all(2 ** fmean(own.values()) / 2 < 5 for own in found.values())


@pytest.mark.parametrize(("name", "a", "b"), CLAIMS)
def test_the_differences_of_the_findings(name, a, b, findings):
    question, runs = study.read(name)
    (found,) = hypotheses.differences([(question, runs)])
    digits = hypotheses.DIGITS[question.measure]
    (one,) = (o for o in found if (question.name(o.a), question.name(o.b)) == (a, b))
    low, high = one.gain.interval
    assert f"{one.gain.value:+.{digits}f} ({low:.{digits}f} to {high:.{digits}f})".replace("-", "−") in findings


def test_what_the_two_plans_with_four_times_the_state_tell(findings):
    (first,), (second,) = (hypotheses.differences([study.read(name)]) for name in FOUR_TIMES)
    said = "told the gates apart (p {:.2g} by Holm), the second, with a learning rate for every arm"
    (one, other) = (found[1] for found in (first, second))
    assert (one.verdict, {o.verdict for o in second}) == ("less", {"not told apart"}) and other.corrected == 1
    assert said.format(one.corrected).replace("p 0.", "p .") in findings


@pytest.mark.parametrize("name", FOUR_TIMES)
def test_no_run_with_four_times_the_state_is_at_a_bound(name):
    last = [row for row in study.read(name)[1] if not row["trial"]]
    assert not any(hypotheses.length_held(row) in hypotheses.bounds("capacity", row) for row in last)


def test_with_four_times_the_state_all_arms_of_the_first_plan_took_the_smaller_rate():
    assert {row["lr"] for row in study.read("capacity-large")[1] if not row["trial"]} == {3e-3}


def test_among_distractors_two_arms_took_the_smallest_learning_rate():
    question, runs = study.read("distractors")
    rates = {question.name(row["mixer"]): row["lr"] for row in runs if not row["trial"]}
    assert [rates[arm] for arm in ("none", "softmax")] == [3e-3] * 2 and rates["wide sigmoid"] > 3e-3


@pytest.mark.parametrize(
    ("name", "wide"), [("capacity-large-rates", 3e-3), ("distractors-rates", 1e-2)], ids=["large", "distractors"]
)
def test_no_rate_of_a_second_plan_is_the_smallest(name, wide):
    question, runs = study.read(name)
    rates = {question.name(row["mixer"]): row["lr"] for row in runs if not row["trial"]}
    assert rates == {"none": 3e-3, "softmax": 1e-2, "wide sigmoid": wide}
    trials = {(question.name(row["mixer"]), row["lr"]): row["score"] for row in runs if row["trial"]}
    assert all(trials[arm, 1e-3] == min(trials[arm, lr] for lr in (1e-3, 3e-3, 1e-2)) for arm in rates)


@pytest.mark.parametrize("names", [FOUR_TIMES, DISTRACTORS])
@pytest.mark.parametrize("b", ["wide sigmoid", "none"])
def test_what_the_page_of_the_studies_says_of_ten_seeds(names, b):
    page = " ".join((ROOT / "docs" / "competition.md").read_text("utf-8").split())
    one, p = study.pooled("softmax", b, names)
    low, high = one.interval
    said = f"{one.value:+.2f} ({low:.2f} to {high:.2f}; {one.n} seeds, p {p:.2g})"
    assert said.replace("-", "−").replace("p 0.", "p .") in page


def test_retnet_holds_no_more_than_the_fewest_pairs_whose_values_are_overwritten(findings):
    question, runs = study.read("overwritten")
    retnet = [row for row in runs if not row["trial"] and question.name(row["mixer"]).startswith("retnet")]
    assert [2 ** hypotheses.length_held(row) / study.positions("overwritten") for row in retnet] == pytest.approx(
        [4] * 15
    )
    (found,) = hypotheses.differences([(question, runs)])
    (one,) = (
        o for o in found if (question.name(o.a), question.name(o.b)) == ("deltanet wide sigmoid", "deltanet none")
    )
    assert f"p {one.corrected:.2g} corrected".replace("p 0.", "p .") in findings


def test_nowhere_is_competition_better_than_its_control(findings):
    """Sentence 2, of the settings of the table."""
    (shown,) = re.findall(r"<!-- generated: effects (.*?) -->", findings)
    tested = [study.effect(setting.arms, "softmax", "wide sigmoid") for setting in study.settings(shown.split())]
    assert len(tested) == 21 and all(one.interval[0] <= 0 for one in tested)


def test_no_other_gate_is_better_and_gates_that_sum_to_one_are_last():
    question, runs = study.read("gates-retnet")
    (found,) = hypotheses.differences([(question, runs)])
    assert len(found) == 7 and {one.verdict for one in found} == {"not told apart"}
    assert question.name(min(found, key=lambda one: one.gain.value).a) == "unscaled"


def test_what_stands_after_correction(findings):
    (shown,) = re.findall(r"<!-- generated: effects (.*?) -->", findings)
    studies = [(name, *study.read(name)) for name in shown.split()]
    found = hypotheses.differences([(question, runs) for _, question, runs in studies])
    stands = [
        (name, question.name(one.a), question.name(one.b))
        for (name, question, _), own in zip(studies, found, strict=True)
        for one in own
        if one.verdict != "not told apart"
    ]
    assert stands == [
        ("capacity-linear-attention", "softmax", "none"),
        ("capacity-linear-attention", "softmax read", "none"),
        ("long-retnet", "wide sigmoid", "none"),
        ("heads-32", "softmax", "none"),
        ("heads-32", "wide sigmoid", "none"),
        ("clusters", "retnet softmax", "retnet none"),
        ("clusters", "retnet wide sigmoid", "retnet none"),
    ]
    assert "seven differences remain, all of gates against no gates" in findings


@pytest.mark.parametrize(
    ("name", "converged"),
    [("long-retnet", "12 of 15"), ("capacity-deltanet", "0 of 20"),
     ("capacity-gated-deltanet", "0 of 20"), ("retrofit", "0 of 15")],
)  # fmt: skip
def test_how_many_runs_of_the_findings_have_converged(name, converged, findings):
    assert any(line.startswith(f"{converged} reported runs converged") for line in study.lines([name]))
    assert f"{converged} runs converged" in findings or converged.startswith("0")


@pytest.mark.parametrize(
    ("name", "arm"), [("capacity-linear-attention", "softmax read"), ("long-retnet", "wide sigmoid")]
)
def test_what_the_findings_call_at_least_32_pairs_in_all_five_seeds(name, arm, findings):
    question, runs = study.read(name)
    (by_mixer,) = collected(runs, question.measure).values()
    (values,) = (own.values() for mixer, own in by_mixer.items() if question.name(mixer) == arm)
    assert [2**value / 2 for value in values] == pytest.approx([32] * 5)
    assert findings.count("at least 32 in all five seeds") == 2


def test_the_speed_of_the_backbones_that_the_findings_do_not_name(findings):
    question, runs = study.read("speed")
    (found,) = hypotheses.differences([(question, runs)])
    named = {question.name(one.a): one for one in found if question.name(one.b).endswith("none")}
    linear = named.pop("linear-attention softmax")
    assert linear.verdict == "less" and {one.verdict for one in named.values()} == {"not told apart"}
    sooner = sorted(-one.gain.value for one in named.values())
    assert len(sooner) == 4 and f"{sooner[0]:.0f} to {sooner[-1]:.0f} steps sooner" in findings
    missed = Counter(row["mixer"] for row in runs if not row["trial"] and row["reached"] is None)
    assert max(missed.values()) == 4 and "did not reach 90 % in up to four of five seeds" in findings


def test_the_table_of_text_and_steps_has_the_statistic_of_its_studies():
    """A difference of steps and one of losses, and the means of a place."""
    found = {row.split(" | ")[0].strip("| "): row for row in study.others_of(["mqar-retnet", "text-gla"])}
    for name, place, where in (
        ("mqar-retnet", "steps to 90 %", None),
        ("text-gla", "loss on repeats", "text, loss on repeats"),
    ):
        question, runs = study.read(name)
        (tested,) = hypotheses.differences([(question, runs)])
        one = next(o for o in tested if where in (None, o.where) and question.name(o.b) == "none")
        digits = hypotheses.DIGITS[question.measure]
        low, high = one.gain.interval
        said = f"{one.gain.value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})".replace("-", "−")
        assert found[f"{name}, {place}"].split(" | ")[4] == said
    losses = [row["loss"] for row in study.read("text-gla")[1] if row["mixer"] == "gla" and not row["trial"]]
    assert found["text-gla, all tokens"].split(" | ")[1] == f"{fmean(losses):.3f}"


def test_the_picture_of_the_effects_shows_them():
    shown, (panel, *_) = study.settings(["clusters"]), study.effects_picture(["clusters"]).axes
    (bar,) = panel.containers
    expected = [study.effect(setting.arms, "softmax", "none").value for setting in shown[::-1]]
    assert list(bar.lines[0].get_xdata()) == pytest.approx(expected)
    assert [label.get_text() for label in panel.get_yticklabels()] == [setting.name for setting in shown[::-1]]


@pytest.mark.parametrize("mixer", ["retnet softmax", "retnet wide sigmoid", "retnet none"])
def test_the_specialisation_of_the_findings(mixer, findings):
    (line,) = (line for line in specialisation.lines() if line.startswith(f"| {mixer} |"))
    assert line.split(" | ")[4] in findings


def by_seed(a, b, names, where):
    """Seed -> the differences of its runs."""
    found = {}
    for name in names:
        question, runs = study.read(name)
        places = collected(runs, question.measure)
        arms = {question.name(mixer): own for mixer, own in places[where or next(iter(places))].items()}
        for seed, value in arms[a].items():
            found.setdefault(seed, []).append(value - arms[b][seed])
    return found


@pytest.mark.parametrize(("a", "b", "names", "seeds", "where", "digits"), POOLED)
def test_the_differences_over_several_studies(a, b, names, seeds, where, digits, findings):
    """Runs of several studies on one seed read the same rows: a seed is one observation."""
    (one, p), expected = study.pooled(a, b, names, where), [fmean(own) for own in by_seed(a, b, names, where).values()]
    by_scipy = stats.ttest_1samp(expected, 0)
    assert (one.n, one.value, p) == (seeds, pytest.approx(fmean(expected)), pytest.approx(by_scipy.pvalue))
    assert one.interval == pytest.approx(tuple(by_scipy.confidence_interval(0.95)))
    numbers = (f"{x:{sign}.{digits}f}" for x, sign in zip((one.value, *one.interval), ("+", "", ""), strict=True))
    said = "{} ({} to {}; {} seeds, p {:.2g})".format(*numbers, one.n, p)
    assert said.replace("-", "−").replace("p 0.", "p .") in findings


@pytest.mark.parametrize(("names", "where"), [(REPEATS, "text, loss on repeats"), (TEXTS, "text, all tokens")])
def test_a_sum_over_studies_that_repeats_its_runs_is_no_surer(names, where):
    once, twice = (study.pooled("softmax", "wide sigmoid", names * times, where) for times in (1, 2))
    assert (once[0].n, once[1]) == (twice[0].n, pytest.approx(twice[1]))


def test_no_difference_on_text_stands_after_correction():
    for name in TEXTS:
        (found,) = hypotheses.differences([study.read(name)])
        assert {one.verdict for one in found} == {"not told apart"}
    assert len(found) == 8


@pytest.mark.parametrize(("name", "arm", "said"), MEANS)
def test_the_means_of_the_findings(name, arm, said, findings):
    question, runs = study.read(name)
    (by_mixer,) = collected(runs, question.measure).values()
    (values,) = (own.values() for mixer, own in by_mixer.items() if question.name(mixer) == arm)
    mean = 2 ** fmean(values) / study.positions(name) if question.measure == "capacity" else fmean(values)
    assert said.format(f"{mean:.0f}") in findings
