"""The report: every rule of the words, short names, and a page that needs nothing beside it."""

import base64
import re
from dataclasses import replace

import pytest

from headrace import zoo
from headrace.report import sweep
from headrace.report.failures import level
from headrace.report.html import write_report
from headrace.report.summary import labels, summarise
from headrace.report.words import words
from headrace.train.defaults import DEFAULTS, PAIR, REVERSE, TEXT
from headrace.train.plan import Study


def results(scores, plan=PAIR, gates=()):
    """Results as a run would leave them: a list of final scores (None: diverged) for each of the plan's mixers."""
    plan = replace(plan, mixers=plan.mixers[: len(scores)], seeds=max(map(len, scores)))
    arms = []
    for mixer, finals in zip(plan.mixers, scores, strict=True):
        spec = zoo.get(mixer)
        state = 100 * plan.shape.heads // spec.num_heads(plan.shape.heads)
        for seed, score in enumerate(finals):
            point = {"scores": {} if score is None else {plan.task.metric.name: score}, "gates": list(gates)}
            arms.append({
                "comparison": plan.name, "mixer": mixer, "seed": seed, "parameters": 1000, "gate_parameters": 0,
                "state_bytes": state, "intermediate_size": None, "scores": point["scores"], "diverged": score is None,
                "curve": [{"step": step, **point} for step in (0, 5)], "tokens_per_second": 10.0, "seconds": 1.0,
            })  # fmt: skip
    return {"study": Study("s", "S", (plan,)).to_json(), "command": "headrace", "environments": [], "arms": arms}


def said(scores, **settings):
    return "\n".join(words(summarise(results(scores, **settings))[0]))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (
            [[0.8, 0.9, 0.86], [0.98, 0.99, 0.97]],
            "98.0 ± 1.0 % against retnet 85.3 ± 5.0 % over 3 seeds: every seed better",
        ),
        ([[0.98, 0.97, 0.98], [0.8, 0.9, 0.86]], "every seed worse"),
        ([[0.8, 0.9, 0.7], [0.81, 0.91, 0.69]], "no difference beyond the spread over seeds (better in 2 of 3)"),
        ([[0.8, 0.9, 0.7], [0.81, 0.91, 0.71]], "no difference beyond the spread over seeds (better in 3 of 3)"),
        ([[0.995, 1.0], [0.999, 1.0]], "both solve the task"),
        ([[0.5], [0.9]], "better in the only seed, which is a hint and no finding"),
        ([[0.5, 0.5, None], [0.9, 0.91, 0.92]], "over 2 seeds: every seed better"),
        ([[0.5, 0.5, None], [0.9, 0.91, 0.92]], "retnet diverged in seed 2"),
        ([[None, None], [0.9, 0.91]], "retnet diverged in seed 0, 1"),
        ([[None], [None]], "No arm of this comparison has a score"),
    ],
)
def test_words_on_a_mixer_and_its_backbone(scores, expected):
    assert expected in said(scores)


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ([0.91, 0.92], "the gain is gating; competition adds nothing"),
        ([0.80, 0.82], "most of the gain is gating, not competition."),
        ([0.90, 0.885], "not competition (softmax against sigmoid: no difference beyond the spread"),
        ([0.60, 0.62], "gating alone gives 28% of the gain"),
        ([0.50, 0.51], "it is competition"),
    ],
)
def test_words_on_the_control(control, expected):
    assert expected in said([[0.5, 0.5], [0.9, 0.89], control])


def test_words_on_a_control_of_nothing():
    text = said([[0.9, 0.8], [0.8, 0.9], [0.85, 0.84]])
    assert "the gain" not in text and "against retnet, no difference beyond the spread" in text


@pytest.mark.parametrize(
    ("fewer", "expected"), [([0.9, 0.9], "as good as"), ([0.1, 0.1], "short of"), ([1, 1], "better than")]
)
def test_words_on_fewer_heads(fewer, expected):
    text = said([[0.5, 0.5], [0.9, 0.91], [0.5, 0.5], fewer])
    assert "With 2 heads the plain retnet reaches" in text and f"{expected} 8 competing heads" in text
    assert "(400 against 100 bytes)" in text


def test_words_where_less_is_better():
    text = said([[2.0, 2.1], [2.3, 2.4], [1.5, 1.5]], plan=TEXT)
    assert (
        "softmax-gla 2.350 ± 0.071 nats/token against gla 2.050 ± 0.071 nats/token over 2 seeds: every seed worse"
        in text
    )
    assert "In order of the mean: transformer 1.500" in text


def test_words_on_gates():
    gate = {"layer": 0, "gate": "write", "entropy": 0.4, "load": [0.5, 0.5], "load_asked": None, "load_other": None}
    assert "its write gates at 0.40" in said([[0.5], [0.9]], gates=[gate])
    assert "almost evenly" in said([[0.5], [0.9]], gates=[gate | {"entropy": 0.99}])
    sink = gate | {"load_asked": [0.9, 0.1], "load_other": [0.1, 0.9]}
    assert "a head to throw things away" in said([[0.5], [0.9]], gates=[sink])


def test_words_on_parameters_that_differ():
    uneven = results([[0.5], [0.9]])
    uneven["arms"][1] |= {"parameters": 1100, "gate_parameters": 20}
    assert "Not matched: softmax-retnet has 8.0% more parameters than retnet" in "\n".join(words(summarise(uneven)[0]))


def test_words_on_what_gates_cost():
    slower = results([[0.5], [0.9]])
    slower["arms"][1] |= {"parameters": 1025, "gate_parameters": 25, "tokens_per_second": 8.0}
    told = "The gates of softmax-retnet add 25 parameters (2.5%) and cost 20% of the tokens per second in training."
    assert told in words(summarise(slower)[0])
    assert "and cost no measurable time in training." in said([[0.5], [0.9]])


def test_words_on_an_end_that_came_too_soon():
    assert "Still learning when training ended" not in said([[0.5], [0.9]])
    rising = results([[0.5], [0.9]])
    for arm in rising["arms"]:
        arm["curve"] = [{"step": step, "scores": {"accuracy": step / 10}, "gates": []} for step in (0, 3, 5)]
    rising["arms"][1]["curve"][1]["scores"]["accuracy"] = 0.495
    sentences = "\n".join(words(summarise(rising)[0]))
    assert "Still learning when training ended: retnet. More steps" in sentences


def test_words_and_pictures_of_length_and_alignment(tmp_path):
    learnt = results([[0.5], [1.0], [0.9]], plan=REVERSE)
    for arm, scores in zip(learnt["arms"], ((0.3, 0.0, 0.0), (1.0, 1.0, 0.0), (1.0, 1.0, 1.0)), strict=True):
        arm["by_length"] = dict(zip(("6", "12", "18"), scores, strict=True))
    weights = [[0.1, 0.9], [0.4, 0.6], [0.5, 0.5]]
    learnt["arms"][2]["alignment"] = {"source": ["a", "b"], "target": ["b", "a", "end"], "weights": weights}
    sentences = "\n".join(words(summarise(learnt)[0]))
    assert "rnn: exact match is below 90% at every length; at 12, the longest of training, it is 0%" in sentences
    assert "luong: exact match stays above 90% up to length 12; at 12" in sentences
    assert "bahdanau: exact match stays above 90% up to length 18, beyond what it was trained on" in sentences
    assert "bahdanau reads most of the character that it writes in 1 of 2 steps" in sentences
    write_report(learnt, tmp_path)
    assert {"reverse-lengths.png", "reverse-alignments.png"} < {path.name for path in tmp_path.glob("*.png")}


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
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert [base64.b64decode(picture)[1:4] for picture in pictures] == [b"PNG"] * 3
    assert {path.name for path in tmp_path.glob("*.png")} == {"pair-curves.png", "pair-scores.png", "pair-cost.png"}


def crowd(seeds):
    """The whole zoo; competition adds 0.1 to every backbone, but takes 0.1 from GLA."""
    names = zoo.several("all")
    gain = {name: 0.1 * (name.startswith("softmax-") and "rnn" not in name) for name in names} | {"softmax-gla": -0.1}
    return results(
        [[0.5 + gain[name] + 0.001 * s for s in range(seeds)] for name in names], replace(PAIR, mixers=names)
    )


def test_a_crowd_is_counted():
    (comparison,) = summarise(crowd(2))
    sentences = words(comparison)
    assert comparison.crowded and len(sentences) < 10
    n = len(zoo.LINEAR)
    assert f"Of {n} backbones, with heads that compete: {n - 1} better (" in sentences[0]
    assert "; 1 worse (gla)." in sentences[0]
    assert "one seed is a hint" in words(summarise(crowd(1))[0])[0]
    assert comparison.shown == comparison.finished and comparison.shown[0].gated
    families = dict(comparison.families())
    assert [c.label for c in families["gla"]] == ["gla", "softmax-gla"] and len(families) == len(
        comparison.plan["mixers"]
    ) - n


def test_a_crowd_is_drawn_backbone_by_backbone(tmp_path):
    page = write_report(crowd(1), tmp_path).read_text("utf-8")
    assert all(f">{name}</td>" in page for name in zoo.names())
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
        {4: [[0.99, 0.98], [1.0, 0.995]], 16: [[0.5, 0.52], [0.8, 0.84]], 32: [[0.1, None], [0.3, 0.2]]}
    )
    over = sweep.read(found)
    assert over.table()[0] == ["retnet", "98.5 ± 0.7 %", "51.0 ± 1.4 %", "10.0 %"]
    assert sweep.words(over) == [
        "retnet: 98.5 % at pairs=4, 10.0 % at pairs=32.",
        "softmax-retnet: 99.8 % at pairs=4, 25.0 % at pairs=32.",
        "softmax-retnet against retnet, by pairs: better at 4, 16, 32.",
    ]
    page = write_report(found, tmp_path).read_text("utf-8")
    first = re.search(r'<img alt="([^"]+)"', page)
    assert first is not None and first[1].startswith("Score against pairs")
    assert page.index("<td>51.0 ± 1.4 %</td>") < page.index("<h2>pair-pairs-4</h2>")
    assert {path.name for path in tmp_path.glob("by-pairs-*.png")} == {"by-pairs-score.png", "by-pairs-capacity.png"}


def test_a_sweep_with_a_mixer_that_never_finished_is_drawn(tmp_path):
    found = sweep_results({"a": [[0.5], [None]], "b": [[0.4], [None]]})
    assert sweep.read(found).table()[1] == ["softmax-retnet", "diverged", "diverged"]
    assert write_report(found, tmp_path).is_file()


def gates(load):
    return [{"layer": 0, "gate": "write", "load": load, "load_asked": [], "load_other": [], "entropy": 0.5}]


@pytest.mark.parametrize(
    ("scores", "load", "expected"),
    [
        ([[0.03, 0.04], [0.9, 0.91]], [0.5, 0.5], "No recall: retnet 3.5 %; guessing gives 3.1 %."),
        (
            [[0.5, 0.5], [0.9, 0.91]],
            [0.94, 0.06],
            "Collapsed: in 2 of 2 gates of softmax-retnet one head takes nearly all",
        ),
        ([[0.5, 0.5], [0.9, 0.91]], [0.6, 0.38, 0.02], "Dead: 2 of 6 heads of softmax-retnet take under a tenth"),
        ([[0.5, 0.5], [0.9, 0.91]], [0.5, 0.5], "2 seeds are few: of two mixers that are alike, one is ahead"),
    ],
)
def test_a_failure_reads_as_a_failure(scores, load, expected):
    assert expected in said(scores, gates=gates(load))


def test_what_did_not_fail_is_not_named():
    five = said([[0.5] * 5, [0.9] * 5], gates=gates([0.6, 0.4]))
    assert not any(word in five for word in ("No recall", "Collapsed", "Dead", "are few"))


def test_every_task_of_recall_knows_what_guessing_gives():
    levels = {name: level(plan.to_json()["task"]) for name, plan in DEFAULTS.items() if name not in ("text", "masked")}
    known = {
        "pair": 1 / 32,
        "key-value": 1 / 64,
        "mqar": 1 / 144,
        "copy": 1 / 16,
        "selective-copy": 1 / 8,
        "induction": 1 / 15,
    }
    assert {name: found for name, found in levels.items() if found is not None} == known | {
        "digits": 0.1,
        "needle": 0.0,
    }
