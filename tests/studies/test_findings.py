"""The report: every rule of its sentences, short names, and a page that needs nothing beside it."""

import html
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from headrace import zoo
from headrace.studies.compare import plots, sweep
from headrace.studies.compare.defaults import DEFAULTS, PAIR, REVERSE, TEXT
from headrace.studies.compare.findings import conditions, findings, headline
from headrace.studies.compare.page import described, guessing, write_report
from headrace.studies.compare.pairwise import competing, pairs
from headrace.studies.compare.plan import Study
from headrace.studies.compare.rows import converged
from headrace.studies.compare.summary import MANY, labels, summarise
from headrace.studies.compare.terminal import print_results
from headrace.studies.report.page import Page, Section
from headrace.tasks import Masked, Pair, Reverse, Text


def results(scores, plan=PAIR, gates=()):
    """Results as a run would leave them: a list of final scores (None: diverged) for each of the plan's mixers."""
    plan = replace(plan, mixers=plan.mixers[: len(scores)], seeds=max(map(len, scores)))
    arms = []
    for mixer, finals in zip(plan.mixers, scores, strict=True):
        spec = zoo.get(mixer)
        state = 100 * plan.shape.heads // spec.num_heads(plan.shape.heads)
        for seed, score in enumerate(finals):
            scores = {} if score is None else {"loss": 1.0, plan.task.metric.name: score}
            point = {"scores": scores, "gates": list(gates)}
            arms.append({
                "comparison": plan.name, "mixer": mixer, "seed": seed, "parameters": 1000, "gate_parameters": 0,
                "state_bytes": state, "intermediate_size": None, "scores": point["scores"], "diverged": score is None,
                "curve": [{"step": 0, **point, "scores": scores and scores | {"loss": 3.0}}, {"step": 2, **point},
                          {"step": 5, **point}], "seconds": 1.0, "speeds": [10.0, 14.0],
                "flops": 500, "lr": plan.recipe.lr, "steps": plan.recipe.steps, "commit": "c0ffee",
            })  # fmt: skip
    study = Study("s", "S", (plan,)).to_json()
    return {"study": study, "command": "headrace", "environments": [], "arms": arms, "trials": [], "tuned": {}}


def said(scores, **settings):
    """The answer and all findings."""
    (comparison,) = summarise(results(scores, **settings))
    return "\n".join([headline([comparison]), *findings(comparison)])


def test_a_curve_is_the_mean_and_the_range_over_seeds():
    (comparison,) = summarise(results([[0.2, 0.3, 0.7]]))
    (contender,) = comparison.contenders
    assert contender.curve() == [(step, pytest.approx(0.4), 0.2, 0.7) for step in (0, 2, 5)]


# Gains 0.12, 0.08, 0.04: mean 0.08, standard deviation 0.04, and 4.3027 of Student's t for 2 degrees of freedom:
# 0.08 ± 4.3027 · 0.04 / √3, which is 0.08 ± 0.0994.
@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (
            [[0.8, 0.85, 0.9], [0.92, 0.93, 0.94]],
            "no clear difference between softmax-retnet and retnet (95 % interval of the gain −1.9 to 17.9 points, "
            "3 seeds).",
        ),
        (  # 0.12 ± 0.0994 / 2
            [[0.8, 0.85, 0.9], [0.94, 0.97, 1.0]],
            "softmax-retnet is better than retnet by 12.0 points (95 % interval 7.0 to 17.0, 3 seeds).",
        ),
        (
            [[0.94, 0.97, 1.0], [0.8, 0.85, 0.9]],
            "softmax-retnet is worse than retnet by 12.0 points (95 % interval 7.0 to 17.0, 3 seeds).",
        ),
        ([[0.995, 1.0], [0.999, 1.0]], "both solve the task (100.0 % and 99.8 %, 2 seeds)"),
        (
            [[0.5], [0.9]],
            "softmax-retnet is ahead of retnet by 40.0 points in one seed, which is too few to tell them apart",
        ),
        ([[0.9], [0.5]], "softmax-retnet is behind retnet by 40.0 points in one seed"),
        (  # 0.43 ± 4.3027 · 0.02 / √3, over the first three seeds, though the last is the best
            [[0.5, 0.5, 0.5, None], [0.91, 0.93, 0.95, 0.99]],
            "softmax-retnet is better than retnet by 43.0 points (95 % interval 38.0 to 48.0, 3 of 4 seeds in which "
            "neither diverged, with means of 93.0 % and 50.0 %).",
        ),
        ([[0.5, 0.5, 0.5, None], [0.91, 0.93, 0.95, 0.99]], "retnet diverged with seed 3: its loss is not finite."),
        (
            [[0.5, 0.5], [0.9, 0.91]],
            "softmax-retnet is ahead of retnet by 40.5 points in 2 seeds, which is too few to tell them apart",
        ),
        ([[0.5], [0.5]], "softmax-retnet is equal to retnet in one seed, which is too few"),
        (
            [[0.43, 0.51, 0.07], [0.53, 0.61, 0.17]],
            "no clear difference between softmax-retnet and retnet (the gain is 10.0 points in each seed, and they are "
            "too few without a spread, 3 seeds).",
        ),
        ([[None, None], [0.9, 0.91]], "retnet diverged with seed 0, 1: its loss is not finite."),
        ([[None, None], [0.9, 0.91]], "Held-out accuracy: softmax-retnet reaches 90.5 ± 0.7 %."),
        ([[None], [None]], "no model has a score"),
    ],
)
def test_a_mixer_and_its_backbone(scores, expected):
    assert expected in said(scores)


def test_a_mean_over_the_seeds_that_did_not_diverge_is_marked_wherever_it_is_shown(tmp_path):
    """retnet's mean, 90 %, is over two seeds of three, and would be the best."""
    found = results([[0.89, None, 0.91, 0.9], [0.88, 0.87, 0.89, 0.86], [0.7, 0.71, None, 0.72]])
    (comparison,) = summarise(found)
    retnet, softmax, sigmoid = comparison.contenders
    assert retnet.mean > softmax.mean and comparison.finished == [softmax, retnet, sigmoid]
    text = html.unescape(write_report(found, tmp_path).read_text("utf-8"))
    assert "90.0 ± 1.0 % (3 of 4 seeds)" in text and "89.0 · diverged · 91.0 · 90.0" in text
    labels = [tick.get_text() for tick in plots.final_scores(comparison).axes[0].get_yticklabels()]
    assert labels == ["sigmoid-retnet (3 of 4 seeds)", "retnet (3 of 4 seeds)", "softmax-retnet"]
    (curves,) = plots.learning_curves(comparison).axes
    assert [line.get_label() for line in curves.lines] == [retnet.named, softmax.named, sigmoid.named]
    assert "2 of 4 seeds in which neither diverged, with means of 71.0 % and 89.5 %" in "\n".join(findings(comparison))


def test_the_best_is_one_that_never_diverged():
    text = said([[0.5, 0.5, 0.5], [0.95, None, 0.96], [0.6, 0.61, 0.62]], plan=REVERSE)
    assert "of 2 mixers that never diverged, bahdanau has the best mean score: bahdanau is better than rnn" in text


def test_a_spread_is_the_standard_deviation_of_a_sample():
    """Of 0.5, 0.6 and 0.8: squares of 0.0178, 0.0011 and 0.0278 over 2; of a population they would be over 3."""
    (comparison,) = summarise(results([[0.5, 0.6, 0.8]]))
    (contender,) = comparison.contenders
    assert contender.spread == pytest.approx((0.14 / 3 / 2) ** 0.5) == pytest.approx(0.1528, abs=1e-4)
    (bar,) = plots.final_scores(comparison).axes[0].containers
    (ends,) = bar.lines[2][0].get_segments()
    assert ends[:, 0] == pytest.approx([100 * (0.6333 - 0.1528), 100 * (0.6333 + 0.1528)], abs=0.01)


def test_a_gain_is_the_mean_over_seeds():
    """Gains 0.1, 0.1, 0.4: their median is 0.1. Interval 0.2 ± 4.3027 · 0.1732 / √3."""
    (comparison,) = summarise(results([[0.5, 0.5, 0.5], [0.6, 0.6, 0.9]]))
    (difference,) = pairs(comparison)
    assert difference.gain.value == pytest.approx(0.2)
    assert difference.gain.interval == pytest.approx((0.2 - 0.4303, 0.2 + 0.4303), abs=1e-4)


def test_sigmoid_gates_do_not_compete():
    (comparison,) = summarise(results([[0.5], [0.9], [0.7]]))
    assert [c.label for c in comparison.contenders] == ["retnet", "softmax-retnet", "sigmoid-retnet"]
    assert [c.label for c in competing(comparison)] == ["softmax-retnet"]
    assert [(d.a.label, d.b.label) for d in pairs(comparison)] == [("softmax-retnet", "retnet")]


def test_gates_and_alignment_are_of_the_end_of_the_first_seed():
    found = results([[0.5, 0.6], [0.9, 0.8]])
    for arm in found["arms"]:
        arm["alignment"] = arm["seed"]
        for point in arm["curve"]:
            point["gates"] = [arm["seed"], point["step"]]
    contender = summarise(found)[0].contenders[0]
    assert (contender.gates, contender.alignment) == ([0, 5], 0)


def test_what_a_page_says_is_text_and_not_markup(tmp_path):
    page = Page("Title", ["about <b>"], [Section("A", sentences=("x < y & <script>",))], "headrace <i>")
    text = page.write(tmp_path / "page.html").read_text("utf-8")
    assert "x &lt; y &amp; &lt;script&gt;" in text and "about &lt;b&gt;" in text and "headrace &lt;i&gt;" in text


def test_without_competition_the_best_is_compared_with_the_second():
    text = said([[0.5] * 3, [0.9, 0.8, 0.7], [0.6, 0.61, 0.62]], plan=REVERSE)
    assert "of 3 mixers, luong has the best mean score: no clear difference between luong and bahdanau (95 %" in text


@pytest.mark.parametrize(
    ("control", "gating", "rest"),
    [
        (
            [0.93, 0.94, 0.97],
            "sigmoid-retnet is better than retnet by 44.7",
            "softmax-retnet is worse than sigmoid-ret",
        ),
        ([0.60, 0.61, 0.63], "sigmoid-retnet is better than retnet by 11.3", "softmax-retnet is better than sigmoid-r"),
        (
            [0.49, 0.50, 0.51],
            "no clear difference between sigmoid-retnet and retnet",
            "softmax-retnet is better than s",
        ),
    ],
)
def test_the_control(control, gating, rest):
    text = said([[0.5] * 3, [0.88, 0.90, 0.90], control])
    assert f"Control with sigmoid gates, which do not compete: {gating}" in text and f"; {rest}" in text


@pytest.mark.parametrize("gates", ["competition=sigmoid", "competition.activation=sigmoid, competition.range=heads"])
def test_the_control_of_equal_range(gates):
    plan = replace(PAIR, mixers=("retnet", "softmax-retnet", f"softmax-retnet({gates})"))
    text = said([[0.5] * 3, [0.88, 0.89, 0.9], [0.9, 0.91, 0.92]], plan=plan)
    assert "softmax-retnet is better than retnet by 39.0" in text and "wide-sigmoid-retnet is better than ret" in text


@pytest.mark.parametrize(
    ("fewer", "expected"),
    [([0.9] * 3, "no clear difference between retnet (heads=2) and softmax-retnet"), ([0.1] * 3, "is worse than"),
     ([1] * 3, "is better than")],
)  # fmt: skip
def test_fewer_heads(fewer, expected):
    text = said([[0.5] * 3, [0.89, 0.9, 0.91], [0.5] * 3, fewer])
    subject = "" if "between" in expected else "retnet (heads=2) "
    assert f"Control with fewer heads and no competition: {subject}{expected}" in text
    assert "(400 against 100 bytes)" in text


def test_where_less_is_better():
    text = said([[2.0, 2.1, 2.2], [2.3, 2.4, 2.51], [1.5] * 3], plan=TEXT)
    assert "Held-out loss: softmax-gla is worse than gla by 0.303 nats/token (95 % interval 0.289 to 0.318" in text


def test_gates_of_whole_models_are_compared():
    """Those inside bert(mixer=softmax-gla) as any other."""
    text = said([[0.1] * 3, [0.5] * 3, [0.7, 0.71, 0.72]], plan=DEFAULTS["masked"])
    assert "bert (mixer=softmax-gla) is better than bert (mixer=gla) by 21.0 points" in text


def test_no_finding_is_about_speed():
    """It varies by the load."""
    sentences = findings(summarise(results([[0.5], [0.9]]))[0])
    assert sentences and not any("per second" in sentence or "time" in sentence for sentence in sentences)


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
def test_an_end_that_came_too_soon(losses, settled):
    falling = results([[0.5], [0.9, 0.8]])
    points = [{"step": 3 * i, "scores": {"accuracy": 0.8, "loss": loss}, "gates": []} for i, loss in enumerate(losses)]
    falling["arms"][2]["curve"] = [*points[:2], points[-1] | {"step": 5}] if len(points) > 2 else points
    assert converged(falling["arms"][2]) == settled
    sentences = "\n".join(findings(summarise(falling)[0]))
    expected = "Not converged: softmax-retnet in 1 of 2 seeds; more steps would change the scores (converged: the last"
    assert (expected in sentences) != settled
    assert "gave less than 2% of the fall of the held-out loss, and the loss ends no further" in sentences or settled
    assert not converged(falling["arms"][0] | {"diverged": True})


def test_the_size_that_findings_hold_for():
    expected = "These results hold for 0.001 M parameters and 0.92 M training tokens;"
    assert expected in said([[0.5]]), "300 steps of 64 rows of 48"


def test_lengths_and_alignments(tmp_path):
    learnt = results([[0.5], [1.0, 1.0], [0.9]], plan=REVERSE)
    by_length = ((0.3, 0.0, 1.0), (1.0, 1.0, 0.0), (1.0, 0.9, 0.0), (1.0, 1.0, 1.0))
    for arm, scores in zip(learnt["arms"], by_length, strict=True):
        arm["by_length"] = dict(zip(("6", "12", "18"), scores, strict=True))
    weights = [[0.1, 0.9], [0.4, 0.6], [0.5, 0.5]]
    learnt["arms"][3]["alignment"] = {"source": ["a", "b"], "target": ["b", "a", "end"], "weights": weights}
    sentences = "\n".join(findings(summarise(learnt)[0]))
    assert (
        "rnn: the mean exact match over 1 seed is below 90% at length 6; at length 12, the longest in training, it is "
        "0.0 %"
    ) in sentences, "a high score at length 18 alone is no score up to length 18"
    assert (
        "luong: the mean exact match over 2 seeds is at least 90% up to length 12; at length 12, the longest in "
        "training, it is "
    ) in sentences
    assert "it is 95.0 ± 7.1 %." in sentences
    assert (
        "bahdanau: the mean exact match over 1 seed is at least 90% up to length 18, which is longer than any in "
        "training"
    ) in sentences
    write_report(learnt, tmp_path)
    assert {"reverse-lengths.png", "reverse-alignments.png"} < {path.name for path in tmp_path.glob("*.png")}


# --- what is matched --------------------------------------------------------------------------------------------------
def test_of_several_models_the_smallest_and_the_largest_are_named():
    found = results([[0.5], [0.9], [0.7]])
    for arm, size in zip(found["arms"], (2000, 1000, 3000), strict=True):
        arm["parameters"] = size
    unmatched = conditions(summarise(found)[0])[-1]
    assert "parameters differ by up to 3.00× (softmax-retnet 1,000, sigmoid-retnet 3,000)" in unmatched


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"parameters": (1000, 1050), "state_bytes": (100, 475), "flops": (500, 520)},
            [
                "Matched: parameters (within 5.0%), FLOPs of a forward pass (within 4.0%).",
                "Not matched: state sizes differ by up to 4.75× (retnet 100 bytes, softmax-retnet 475 bytes).",
            ],
        ),
        (
            {"parameters": (1670, 1000), "state_bytes": (0, 0), "flops": (None, 520)},
            [
                "Matched: state sizes (all zero).",
                "Not matched: parameters differ by up to 1.67× (softmax-retnet 1,000, retnet 1,670); "
                "FLOPs are not counted for retnet.",
            ],
        ),
        (
            {"parameters": (1000, 1051), "state_bytes": (0, 8), "flops": (500, 1000)},
            [
                "Not matched: parameters differ by up to 1.05× (retnet 1,000, softmax-retnet 1,051); "
                "state sizes differ (retnet 0 bytes, softmax-retnet 8 bytes); "
                "FLOPs of a forward pass differ by up to 2.00× (retnet 500 per row, softmax-retnet 1,000 per row).",
            ],
        ),
    ],
)
def test_what_is_matched(sizes, expected, tmp_path):
    found = results([[0.5], [0.9]])
    for i, arm in enumerate(found["arms"]):
        arm |= {field: values[i] for field, values in sizes.items()}
    assert conditions(summarise(found)[0]) == expected
    page = html.unescape(write_report(found, tmp_path).read_text("utf-8"))
    assert all(page.index(sentence) < page.index("<h2>") for sentence in expected), "before everything else"


def test_speed_is_a_median_with_its_quartiles():
    (comparison,) = summarise(results([[0.5, 0.6]]))
    assert comparison.contenders[0].speed == "12 ± 2", "of 10, 14, 10, 14"
    one = results([[0.5]])
    one["arms"][0]["speeds"] = [1234.5]
    assert summarise(one)[0].contenders[0].speed == "1,234", "one stretch has no spread"


def test_the_terminal_answers_first():
    screen = Console(file=io.StringIO(), width=160)
    found = results([[0.5, 0.5], [0.9, 0.91]])
    print_results(found, screen)
    lines = screen.file.getvalue().splitlines()
    assert lines[0] == headline(summarise(found)) and lines[1].startswith("pair: Matched: parameters (within 0.0%)")
    assert re.search(r"retnet +│ +50.0 ± 0.0 % │ +50.0 · 50.0 │ +1,000 │ +100 │ +12 ± 2 │", "\n".join(lines))


def test_one_model_is_matched_with_nothing():
    assert conditions(summarise(results([[0.5]]))[0]) == []


# --- the task ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("task", "expected"),
    [(Pair(), "3.1 %"), (Text(), "5.545 nats/token"), (Reverse(), "about 0 %"), (Masked(length=9), "0.4 %")],
)  # fmt: skip
def test_what_guessing_scores(task, expected):
    """1 / 32; log 256; 1 / 259."""
    assert expected in guessing(task)


@pytest.mark.parametrize("task", [task for task in DEFAULTS if task != "needle"])
def test_every_task_is_explained_and_drawn(task):
    about, row, more = re.findall(r">([^<]+)</", described(DEFAULTS[task].task))
    assert about.endswith((".", "?")) and "Uniform guesses" in more
    lines = row.splitlines()
    assert lines[-1].startswith(("answer", "target", "segment")) and not any(line.startswith(" ") for line in lines)


def test_short_names():
    short = labels(PAIR.mixers)
    assert list(short.values()) == ["retnet", "softmax-retnet", "sigmoid-retnet", "retnet (heads=2)"]
    assert labels(["gla(heads.count=2)"]) == {"gla(heads.count=2)": "gla (heads=2)"}


def test_a_report_of_forty_arms_is_one_file(tmp_path):
    mixers = tuple(zoo.LINEAR) + tuple(f"softmax-{name}" for name in zoo.LINEAR) + ("transformer",)
    page = write_report(
        results([[0.5, 0.6, 0.7]] * len(mixers), plan=replace(PAIR, mixers=mixers)), tmp_path
    ).read_text("utf-8")
    assert "softmax-gated-deltanet" in page and not re.search(r"(src|href)=.?(http|/)", page)
    assert page.count("</svg>") == 2
    assert {path.name for path in tmp_path.glob("*.png")} == {"pair-curves.png", "pair-scores.png"}


def test_a_mixer_has_one_colour_in_every_table_and_picture(tmp_path):
    """Also where another comparison of the study has other mixers, and where one of them never finished."""
    parts = [results([[None], [0.9]]), results([[2.0], [2.1], [1.9]], plan=TEXT)]
    plans = [part["study"]["plans"][0] for part in parts]
    arms = parts[0]["arms"][1:] + parts[1]["arms"]
    page = write_report(parts[0] | {"study": parts[0]["study"] | {"plans": plans}, "arms": arms}, tmp_path)
    text = page.read_text("utf-8")
    swatches = re.findall(r'background: ([^"]+)"></i>([\w-]+)<', text)
    assert set(swatches) == {
        ("var(--colour-1)", "softmax-retnet"), ("var(--colour-2)", "gla"), ("var(--colour-3)", "softmax-gla"),
        ("var(--colour-4)", "transformer"),
    }  # fmt: skip
    drawn = text[text.index("</table>") :]
    assert all(f"stroke: {colour}" in drawn for colour, _ in swatches) and "#2f6f9f" not in drawn, (
        "themed, light or dark"
    )


def test_three_findings_are_shown_and_the_rest_folded(tmp_path):
    gate = [{"layer": 0, "gate": "write", "entropy": 0.4, "load": [1.0, 0.0], "load_asked": None, "load_other": None}]
    found = results([[0.5, 0.5], [0.9, 0.91], [0.7, 0.7]], gates=gate)
    text = write_report(found, tmp_path).read_text("utf-8")
    more = len(findings(summarise(found)[0])) - 3
    assert more > 1 and f"<summary>{more} more findings</summary>" in text
    assert text[: text.index("<details>")].count("<li>") == 3


ALL = tuple(zoo.names())


def whole_zoo(seeds, names=ALL):
    """Competition adds 0.1 to every backbone, but takes 0.1 from GLA."""
    gain = {name: 0.1 * (name.startswith("softmax-") and "rnn" not in name) for name in names} | {"softmax-gla": -0.1}
    return results(
        [[0.5 + gain[name] * (1 + 0.01 * s) for s in range(seeds)] for name in names], replace(PAIR, mixers=names)
    )


def test_many_mixers_are_counted():
    (comparison,) = summarise(whole_zoo(3))
    n = len(zoo.LINEAR)
    told = headline([comparison])
    assert comparison.many and told.startswith(
        f"Held-out accuracy: effect of competition on {n} backbones: {n - 1} better ("
    )
    assert told.endswith("; 1 worse (gla), each judged by its 95 % interval.")
    one = headline(summarise(whole_zoo(1)))
    assert f"competition is ahead for {n - 1} of {n} backbones, in one seed, which is too few to judge" in one
    assert "Softmax-retnet is better than retnet by 10.1 points" in "\n".join(findings(comparison))
    assert comparison.shown == comparison.finished and comparison.shown[0].gated
    families = dict(comparison.families())
    assert [c.label for c in families["gla"]] == ["gla", "softmax-gla"] and len(families) == len(
        comparison.plan["mixers"]
    ) - n


def test_many_mixers_are_drawn_backbone_by_backbone(tmp_path):
    backbones = list(zoo.LINEAR)[:7]
    names = (*backbones, *(f"softmax-{name}" for name in backbones), *zoo.SCANS)
    assert "gla" in backbones and len(names) > MANY
    found = whole_zoo(1, names)
    for arm in found["arms"]:
        arm["curve"][-1]["gates"] = gates([0.6, 0.4]) if arm["mixer"] == "softmax-gla" else []
    (comparison,) = summarise(found)
    _, entropy = plots.draw(comparison)["entropy"]
    assert [ax.get_title(loc="left") for ax in entropy.axes if ax.lines] == ["gla"]
    page = write_report(found, tmp_path).read_text("utf-8")
    assert all(f"</i>{name}</span></td>" in page for name in names)
    assert (tmp_path / "pair-curves.png").stat().st_size > 10_000


def sweep_results(by_value, **settings):
    """Results of a sweep over pairs: for each value the scores that `results` takes."""
    plans = {value: replace(PAIR, name=f"pair-pairs-{value}") for value in by_value}
    parts = [results(scores, replace(plans[value]), **settings) for value, scores in by_value.items()]
    study = {"name": "s", "title": "S", "plans": [part["study"]["plans"][0] for part in parts]}
    study["sweep"] = {"field": "pairs", "values": list(by_value)}
    return parts[0] | {"study": study, "arms": [arm for part in parts for arm in part["arms"]]}


def test_a_sweep_has_a_table_words_and_a_curve_before_everything_else(tmp_path):
    found = sweep_results(
        {
            4: [[0.99, 0.98, 0.985], [1.0, 0.97, 0.995]],
            16: [[0.5, 0.52, 0.51], [0.8, 0.84, 0.8]],
            32: [[0.1, None, None], [0.3, 0.2, 0.1]],
        }
    )
    over = sweep.read(found)
    assert over.table()[0] == ["retnet", "98.5 ± 0.5 %", "51.0 ± 1.0 %", "10.0 % (1 of 3 seeds)"]
    assert sweep.answer(over) == (
        "softmax-retnet compared with retnet, by pairs: no clear difference at 4, better at 16, too few seeds at 32 "
        "(by 95 % intervals over seeds)."
    )
    lost = "At pairs=32: retnet diverged with seed 1, 2: its loss is not finite."
    assert sweep.findings(over) == [lost]
    over.comparisons[2].contenders[0].arms[0]["scores"]["accuracy"] = 0.03
    chance = "At pairs=32: At chance, no more than 2 points above 3.1 %: retnet 3.0 % (1 of 3 seeds)."
    assert sweep.findings(over) == [chance, lost]
    page = write_report(found, tmp_path).read_text("utf-8")
    assert page.index("Score against pairs") < page.index("<h2>pair-pairs-4</h2>")
    assert page.index('<td data-name="pairs=16">51.0 ± 1.0 %</td>') < page.index("<h2>pair-pairs-4</h2>")
    assert {path.name for path in tmp_path.glob("by-pairs-*.png")} == {"by-pairs-score.png", "by-pairs-capacity.png"}


def test_a_sweep_with_a_mixer_that_never_finished_is_drawn(tmp_path):
    found = sweep_results({"a": [[0.5], [None]], "b": [[0.4], [None]]})
    over = sweep.read(found)
    assert over.table()[1] == ["softmax-retnet", "diverged", "diverged"]
    assert sweep.answer(over) == headline(over.comparisons), "no pair to compare"
    assert write_report(found, tmp_path).is_file()


def gates(load, entropy=0.5):
    return [{"layer": 0, "gate": "write", "load": load, "load_asked": [], "load_other": [], "entropy": entropy}]


@pytest.mark.parametrize(
    ("scores", "load", "expected"),
    [
        (
            [[0.03, 0.04], [0.9, 0.91]],
            [0.5, 0.5],
            "At chance, no more than 2 points above 3.1 %: retnet 3.5 ± 0.7 %.",
        ),
        (
            [[0.5, 0.5], [0.9, 0.91]],
            [0.94, 0.06],
            "Collapsed gates: in 2 of 2 gates of softmax-retnet, one head takes 90% or more.",
        ),
        (
            [[0.5, 0.5], [0.9, 0.91]],
            [0.6, 0.38, 0.02],
            "Dead heads: 2 of 6 heads of softmax-retnet take less than 10% of an even share.",
        ),
    ],
)
def test_a_failure_reads_as_a_failure(scores, load, expected):
    assert expected in said(scores, gates=gates(load))


@pytest.mark.parametrize(
    ("score", "load", "failed"),
    [
        (1 / 32 + 0.019, [0.5, 0.5], "At chance"), (1 / 32 + 0.021, [0.5, 0.5], None),
        (0.5, [0.91, 0.09], "Collapsed"),
        (0.5, [0.89, 0.11], None), (0.5, [0.56, 0.4, 0.04], None), (0.5, [0.56, 0.41, 0.03], "Dead"),
    ],
)  # fmt: skip
def test_where_a_failure_begins(score, load, failed):
    """Two points above chance; nine tenths by one head; a tenth of an even share, a thirtieth of three heads."""
    text = said([[score], [0.9]], gates=gates(load))
    assert {word for word in ("At chance", "Collapsed", "Dead") if word in text} == ({failed} if failed else set())


@pytest.mark.parametrize(("entropy", "even"), [(0.95, True), (0.949, False)])
def test_gates_that_choose_nothing(entropy, even):
    text = said([[0.5, 0.5], [0.9, 0.91]], gates=gates([0.5, 0.5], entropy))
    expected = "Even gates: in 2 of 2 gates of softmax-retnet, the entropy over heads is at least 95% of its maximum."
    assert (expected in text) == even


@pytest.mark.parametrize(("score", "held"), [(0.9, True), (0.89, False)])
def test_what_holds_at_a_length(score, held):
    found = results([[0.5]], plan=REVERSE)
    found["arms"][0]["by_length"] = {"6": 1.0, "12": score}
    assert (f"up to length {12 if held else 6};" in "\n".join(findings(summarise(found)[0]))) is True


def test_the_loss_of_a_text_in_longer_rows():
    found = results([[3.25]], plan=TEXT)
    found["arms"][0]["by_length"] = {"96": 3.25, "6144": 4.5}
    text = "\n".join(findings(summarise(found)[0]))
    assert "the loss is 3.250 nats/token in rows of 96, as in training, and 4.500 nats/token in rows of 6144" in text


def test_pictures_show_the_numbers():
    """Percent, and means over seeds."""
    learnt = results([[0.2, 0.4], [0.9, 0.9]], plan=REVERSE)
    for arm in learnt["arms"]:
        arm["by_length"] = {"6": arm["scores"]["exact match"], "12": 0.1}
    (comparison,) = summarise(learnt)
    drawn = {name: figure.axes for name, (_, figure) in plots.draw(comparison).items()}
    (curves,), (scores,), (lengths,) = (drawn[name] for name in ("curves", "scores", "lengths"))
    assert list(curves.lines[0].get_ydata()) == pytest.approx([30] * 3)
    assert list(lengths.lines[0].get_ydata()) == pytest.approx([30, 10])
    assert [line.get_xdata()[0] for line in scores.lines[:3]] == pytest.approx([30, 30 - 200**0.5, 30 + 200**0.5])


def test_what_did_not_fail_is_not_named():
    five = said([[0.5] * 5, [0.9] * 5], gates=gates([0.6, 0.4]))
    assert not any(word in five for word in ("of guessing", "Collapsed", "Dead", "Even"))


def test_every_task_of_recall_knows_what_guessing_gives():
    tasks = {name: plan.task for name, plan in DEFAULTS.items() if name not in ("text", "masked")}
    levels = {name: getattr(task, "chance", None) for name, task in tasks.items()}
    known = {
        "pair": 1 / 32,
        "key-value": 1 / 16,
        "mqar": 1 / 20,
        "copy": 1 / 16,
        "selective-copy": 1 / 8,
        "induction": 1 / 15,
    }
    assert {name: found for name, found in levels.items() if found is not None} == known | {
        "digits": 0.1,
        "needle": 0.0,
    }
