"""The report of a comparison as a page and its pictures; what it says is in golden/."""

import math
import re

import pytest

from headrace import zoo
from headrace.comparison import plots
from headrace.comparison.defaults import DEFAULTS, DEMO, PAIR, PLANS, REVERSE, TEXT
from headrace.comparison.findings import findings
from headrace.comparison.page import described, guessing, report, write_report
from headrace.comparison.summary import MANY, labels, parsed, shared_settings, summarize
from headrace.report.numbers import compact, quartiles, significant, spread
from headrace.report.page import Page, Section
from headrace.tasks import Masked, Pair, Reverse, Text
from stored import gates, many, results, swept

SURVIVORS = results([[0.89, None, 0.91, 0.9], [0.88, 0.87, 0.89, 0.86], [0.7, 0.71, None, 0.72]])
LINEAR = ("gla", "retnet", "mamba2", "rwkv6", "deltanet", "kda")
BY_BACKBONE = (*LINEAR, *(f"softmax-{name}" for name in LINEAR), *zoo.SCANS)
WEIGHTS = {"source": ["a", "b"], "target": ["b", "a", "end"], "weights": [[0.1, 0.9], [0.4, 0.6], [0.5, 0.5]]}


# --- pictures --------------------------------------------------------------------------------------------------------
def test_pictures_show_percent_means_and_standard_deviations():
    scores = {"6": 0.3, "12": 0.1}
    (comparison,) = summarize(results([[0.2, 0.4], [0.9, 0.9]], REVERSE, by_length=[scores, scores]))
    drawn = {name: figure.axes for name, (_, figure) in plots.draw(comparison).items()}
    (curves,), (bars,), (lengths,) = (drawn[name] for name in ("curves", "scores", "lengths"))
    assert list(curves.lines[0].get_ydata()) == pytest.approx([30] * 3)
    assert list(lengths.lines[0].get_ydata()) == pytest.approx([30, 10])
    assert [line.get_xdata()[0] for line in bars.lines[:3]] == pytest.approx([30, 30 - 200**0.5, 30 + 200**0.5])


def test_a_curve_is_the_mean_and_the_range_over_seeds():
    (comparison,) = summarize(results([[0.2, 0.3, 0.7]]))
    assert comparison.contenders[0].curve() == [(step, pytest.approx(0.4), 0.2, 0.7) for step in (0, 2, 5)]


def test_pictures_mark_means_over_the_seeds_that_did_not_diverge():
    (comparison,) = summarize(SURVIVORS)
    retnet, softmax, sigmoid = comparison.contenders
    assert retnet.mean > softmax.mean and comparison.finished == [softmax, retnet, sigmoid]
    drawn = {name: figure.axes[0] for name, (_, figure) in plots.draw(comparison).items()}
    names = [tick.get_text() for tick in drawn["scores"].get_yticklabels()]
    assert names == ["retnet(competition=sigmoid) (3 of 4 seeds)", "retnet (3 of 4 seeds)", "softmax-retnet"]
    assert [line.get_label() for line in drawn["curves"].lines] == [retnet.named, softmax.named, sigmoid.named]


def test_scores_that_are_not_finite_are_left_out_and_counted():
    """At one length of one seed of three, at another of all."""
    found = results([[0.2, 0.4, 0.3]], REVERSE)
    for arm, score in zip(found["arms"], (0.2, math.nan, 0.4), strict=True):
        arm["by_length"] = {"6": 0.5, "12": score, "24": math.nan}
    (*_, section) = report(found, None).sections
    assert list(section.rows[0][1:]) == ["50.0 ± 0.0 %", "30.0 ± 14.1 % (2 of 3 seeds)", "not finite"]
    drawn = plots.draw(summarize(found)[0])["lengths"][1].axes[0]
    assert drawn.lines[0].get_ydata()[:2].tolist() == pytest.approx([50, 30]) and drawn.lines[0].get_ydata().mask[2]


def test_gates_and_alignment_are_of_the_end_of_the_first_seed():
    data = results([[0.5, 0.6], [0.9, 0.8]])
    for arm in data["arms"]:
        arm["alignment"] = arm["seed"]
        for point in arm["curve"]:
            point["gates"] = [arm["seed"], point["step"]]
    contender = summarize(data)[0].contenders[0]
    assert (contender.gates, contender.alignment) == ([0, 5], 0)


def test_heads_of_queries_are_drawn_apart_but_not_of_a_text():
    """The last position of a row of text alone has no label."""
    apart = [gate | {"load_asked": [0.9, 0.1], "load_other": [0.1, 0.9]} for gate in gates([0.5, 0.5])]
    for plan, expected in ((PAIR, [0.9, 0.1]), (TEXT, [0.5])):
        contender = summarize(results([[0.5]], plan, apart))[0].contenders[0]
        assert [load[0] for _, load in plots.head_rows(contender)] == expected


def test_a_report_has_a_picture_for_all_that_was_measured(tmp_path):
    by_length = [{"6": 1.0, "12": 0.5}] * 2
    write_report(results([[0.5], [1.0]], REVERSE, by_length=by_length, alignment=(None, WEIGHTS)), tmp_path)
    assert {f"reverse-{name}.png" for name in ("curves", "scores", "lengths", "alignments")} == {
        path.name for path in tmp_path.glob("*.png")
    }
    write_report(swept({4: [[0.5], [0.9]], 16: [[0.4], [None]]}), tmp_path)
    assert {path.name for path in tmp_path.glob("by-*")} == {"by-pairs-score.png", "by-pairs-capacity.png"}


def test_a_mixer_of_one_value_is_not_said_to_have_diverged_at_the_others():
    """As with --match state, which gives a mixer other sizes at other values."""
    data = swept({4: [[0.5], [0.9]], 16: [[0.4], [None]]})
    plan, old, new = data["study"]["plans"][0], PAIR.mixers[0], "retnet(heads.expand_v=1, heads.key_dim=3)"
    plan["mixers"][0], plan["specs"][new] = new, plan["specs"][old]
    data["arms"][0]["mixer"] = new
    section = next(section for section in report(data, None).sections if section.title == "By pairs")
    assert [[str(cell) for cell in row[1:]] for row in section.rows] == [
        ["50.0 %", "–"], ["90.0 %", "diverged"], ["–", "40.0 %"],
    ]  # fmt: skip


def test_many_mixers_are_drawn_backbone_by_backbone_in_one_file(tmp_path):
    assert len(BY_BACKBONE) > MANY
    data = many(3, BY_BACKBONE)
    for arm in data["arms"]:
        arm["curve"][-1]["gates"] = gates([0.6, 0.4]) if arm["mixer"] == "softmax-gla" else []
    (comparison,) = summarize(data)
    _, entropy = plots.draw(comparison)["entropy"]
    assert [ax.get_title(loc="left") for ax in entropy.axes if ax.lines] == ["gla"]
    page = write_report(data, tmp_path).read_text("utf-8")
    assert all(f"</i>{name}</span></td>" in page for name in BY_BACKBONE)
    assert not re.search(r"(src|href)=.?(http|/)", page)
    assert page.count("</svg>") == len(list(tmp_path.glob("*.png"))) == 4


# --- the page --------------------------------------------------------------------------------------------------------
def test_text_on_a_page_is_no_markup(tmp_path):
    page = Page("Title", ["about <b>"], [Section("A", sentences=("x < y & <script>",))], command="headrace <i>")
    text = page.write(tmp_path / "page.html").read_text("utf-8")
    assert "x &lt; y &amp; &lt;script&gt;" in text and "about &lt;b&gt;" in text and "headrace &lt;i&gt;" in text


def test_a_mixer_has_one_colour_in_every_table_and_picture(tmp_path):
    """Also where another comparison of the study has other mixers, and where one of them never finished."""
    parts = [results([[None], [0.9]]), results([[2.0], [2.1], [1.9]], TEXT)]
    plans, arms = [part["study"]["plans"][0] for part in parts], parts[0]["arms"][1:] + parts[1]["arms"]
    page = write_report(parts[0] | {"study": parts[0]["study"] | {"plans": plans}, "arms": arms}, tmp_path)
    text = page.read_text("utf-8")
    swatches = set(re.findall(r'background: ([^"]+)"></i>([\w-]+)<', text))
    mixers = ("softmax-retnet", "gla", "softmax-gla", "transformer")
    assert swatches == {(f"var(--colour-{i})", mixer) for i, mixer in enumerate(mixers, 1)}
    drawn = text[text.index("</table>") :]
    assert all(f"stroke: {colour}" in drawn for colour, _ in swatches) and "#2f6f9f" not in drawn, "light or dark"


def test_three_findings_are_shown_and_the_rest_is_folded(tmp_path):
    data = results([[0.5, 0.5], [0.9, 0.91], [0.7, 0.7]], gates=gates([1.0, 0.0], 0.4))
    text = write_report(data, tmp_path).read_text("utf-8")
    more = len(findings(summarize(data)[0])) - 3
    assert more > 1 and f"<summary>{more} more findings</summary>" in text
    assert text[: text.index("<details>")].count("<li>") == 3


def test_matched_sizes_stand_before_all_sections(tmp_path):
    page = write_report(swept({4: [[0.5], [0.9]]}), tmp_path).read_text("utf-8")
    places = [page.index(part) for part in ("Matched: parameters", "Score against pairs", "<h2>pair-pairs-4</h2>")]
    assert places == sorted(places) and page.index("Matched") < page.index("<h2>")


# --- tasks, names and numbers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("task", "expected"),
    [(Pair(), "3.1 %"), (Text(), "5.549 nats/token"), (Reverse(), "about 0 %"), (Masked(length=9), "0.4 %")],
)
def test_the_score_of_guessing(task, expected):
    """1 / 32; log 257; 1 / 260."""
    assert expected in guessing(task)


def test_tasks_know_their_level_of_chance():
    known = {"pair": 32, "key-value": 16, "mqar": 20, "copy": 16, "selective-copy": 8, "induction": 15, "digits": 10}
    known |= {"parity": 2, "modular-counting": 3, "s3": 6, "s5": 120, "flip-flop": 2, "dyck": 3}
    tasks = {name: plan.task for name, plan in DEFAULTS.items() if name not in ("text", "masked")}
    levels = {name: getattr(task, "chance", None) for name, task in tasks.items()}
    expected = {name: 1 / answers for name, answers in known.items()} | {"needle": 0.0}
    assert {name: level for name, level in levels.items() if level is not None} == expected


@pytest.mark.parametrize("task", [task for task in DEFAULTS if task != "needle"])
def test_every_task_is_explained_and_drawn(task):
    about, row, more = re.findall(r">([^<]+)</", described(DEFAULTS[task].task))
    assert about.endswith((".", "?")) and "Uniform guesses" in more
    lines = row.splitlines()
    assert lines[-1].startswith(("answer", "target", "segment")) and not any(line.startswith(" ") for line in lines)


def test_labels_leave_out_what_all_mixers_share():
    own = ["retnet", "softmax-retnet", "retnet(competition=sigmoid)", "retnet(heads.count=2)"]
    assert list(labels(PAIR.mixers).values()) == own
    assert labels(["gla(heads.count=2)"]) == {"gla(heads.count=2)": "gla(heads.count=2)"}
    nested = ["bert(mixer=gla(heads.count=2, decay.rank=4), style.bias=false)", "bert(mixer=gla(decay.rank=4))"]
    assert list(labels(nested).values()) == [
        "bert(mixer=gla(heads.count=2,decay.rank=4), style.bias=false)", "bert(mixer=gla(decay.rank=4))",
    ]  # fmt: skip
    several = ["lolcats(window=64)+gla", "gla(heads.count=2) + lolcats(window=64)", "gla"]
    assert list(labels(several).values()) == ["lolcats(window=64)+gla", "gla(heads.count=2)+lolcats(window=64)", "gla"]
    assert shared_settings(several[:2]) == []


def test_what_a_report_names_can_be_typed():
    for plan in (*PLANS, *DEMO.plans):
        for mixer, name in labels(plan.mixers).items():
            others = ", ".join([*shared_settings(plan.mixers), *parsed([name])[name][1]])
            assert zoo.get(f"{name.partition('(')[0]}({others})") == zoo.get(mixer) and zoo.get(name)


def test_every_sigmoid_control_of_a_plan_is_the_matched_one():
    gates = [mixer.competition for plan in (*PLANS, *DEMO.plans) for mixer in map(zoo.get, plan.mixers)
             if getattr(mixer, "competition", None)]  # fmt: skip
    assert {gate for gate in gates if gate.activation == "sigmoid"} == {zoo.SIGMOID}


@pytest.mark.parametrize(
    ("value", "text"),
    [(999.94, "999.9"), (1000.0, "1,000"), (123456.7, "123,457"), (2e12, "2e+12"), (0.12345, "0.1235")],
)
def test_significant_digits(value, text):
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (999, "999"), (999.9, "1k"), (1234, "1.23k"), (999.9e6, "1G"), (2**20, "1.05M"), (15e9, "15G")],
)
def test_compact_numbers(value, text):
    assert compact(value) == text


def test_sizes_and_tokens_are_in_millions_with_all_digits_before_the_point():
    (comparison,) = summarize(results([[0.5]], parameters=(123_400_000,)))
    comparison.plan["recipe"]["steps"] = 1_000_000
    assert "hold for 123 M parameters and 3,072 M training tokens" in findings(comparison)[-1]


def test_speed_is_a_median_with_half_its_quartile_range():
    """Of 10, 14, 10, 14 over two seeds; one stretch has no spread."""
    assert summarize(results([[0.5, 0.6]]))[0].contenders[0].speed == "12 ± 2"
    assert summarize(results([[0.5]], speeds=[[1234.5]]))[0].contenders[0].speed == "1,234"
    assert (quartiles([3.0]), spread([3.0]), spread([3.0, 1.0])) == ([3.0] * 3, None, pytest.approx((3 - 1) / 2))
    assert quartiles([4.0, 1.0, 2.0]) == [1.0, 2.0, 4.0] and quartiles([1.0, 2.0, 3.0, 4.0]) == [1.25, 2.5, 3.75]
