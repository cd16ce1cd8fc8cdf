"""Pages, tables and sentences of small sets of rows, as files in golden/.

`make golden` writes the files anew: read their difference before it is committed. The
statistics in them are checked against scipy and hand-worked values in test_stats.py.
"""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import Markup
from rich.console import Console

from headrace import zoo
from headrace.comparison import hypotheses
from headrace.comparison.defaults import DEFAULTS, PAIR, REVERSE, TEXT
from headrace.comparison.findings import conditions, findings, headline, judged, of_sweep
from headrace.comparison.page import by_length, report
from headrace.comparison.plan import Tuning
from headrace.comparison.summary import Sweep, summarize
from headrace.report import differences
from headrace.report.page import print_sections
from stored import gates, many, question, record, results, row, rows, swept

GOLDEN = Path(__file__).parent / "golden"
LONG = "softmax-retnet(competition.activation=sigmoid)"
NARROW = "retnet(competition=sigmoid, competition.range=2)"
LENGTHS = ({"6": 0.3, "12": 0.0, "18": 1.0}, {"6": 1.0, "12": 0.9, "18": 0.0}, {"6": 1.0, "12": 1.0, "18": 1.0})


# --- compare ---------------------------------------------------------------------------------------------------------
def rates():
    """A plan with a search for a learning rate, in which a trial and a reported run diverged."""
    plan = replace(PAIR, mixers=PAIR.mixers[:2], seeds=3, tuning=Tuning("lr", (1e-3, 1e-2), (7, 8)))
    found = results([[0.5, 0.6, 0.7], [0.8, None, 0.98]], plan)
    scores = [[0.4, 0.5], [0.7, 0.8]], [[0.6, 0.7], [0.9, None]]
    trials = [arm for own, trial in zip(scores, plan.trials(), strict=True) for arm in results(own, trial)["arms"]]
    asked = question(pairs=((plan.mixers[1], plan.mixers[0]),))
    study = found["study"] | {"question": vars(asked)}
    return found | {"study": study, "trials": trials, "tuned": {"pair": dict.fromkeys(plan.mixers, 1e-2)}}


def beside(sigmoid):
    scores = [[0.5] * 3, [0.88, 0.89, 0.9], [0.9, 0.91, 0.92]]
    return results(scores, replace(PAIR, mixers=("retnet", "softmax-retnet", sigmoid)))


def sized(parameters, state_bytes, flops):
    scores = [[0.5], [0.9], [0.7]][: len(flops)]
    return results(scores, parameters=parameters, state_bytes=state_bytes, flops=flops)


COMPARISONS = {
    "no clear difference: the interval of the gain contains 0": results([[0.8, 0.85, 0.9], [0.92, 0.93, 0.94]]),
    "better": results([[0.8, 0.85, 0.9], [0.94, 0.97, 1.0]]),
    "worse": results([[0.94, 0.97, 1.0], [0.8, 0.85, 0.9]]),
    "both solve the task": results([[0.995, 1.0], [0.999, 1.0]]),
    "ahead in one seed": results([[0.5], [0.9]]),
    "ahead in two seeds": results([[0.5, 0.5], [0.9, 0.91]]),
    "equal gains of three seeds": results([[0.43, 0.51, 0.07], [0.53, 0.61, 0.17]]),
    "a seed diverged": results([[0.5, 0.5, 0.5, None], [0.91, 0.93, 0.95, 0.99]]),
    "means are over the seeds that are left": results(
        [[0.89, None, 0.91, 0.9], [0.88, 0.87, 0.89, 0.86], [0.7, 0.71, None, 0.72]]
    ),
    "all seeds of the backbone diverged": results([[None, None], [0.9, 0.91]]),
    "every run diverged": results([[None], [None]]),
    "without competition": results([[0.5] * 3, [0.9, 0.8, 0.7], [0.6, 0.61, 0.62]], REVERSE),
    "the best never diverged": results([[0.5] * 3, [0.95, None, 0.96], [0.6, 0.61, 0.62]], REVERSE),
    "sigmoid gates do as well": results([[0.5] * 3, [0.88, 0.90, 0.90], [0.93, 0.94, 0.97]]),
    "sigmoid gates by their long name": beside(LONG),
    "sigmoid gates of another range than the softmax": beside(NARROW),
    "fewer heads do as well": results([[0.5] * 3, [0.89, 0.9, 0.91], [0.5] * 3, [0.9] * 3]),
    "less is better": results([[2.0, 2.1, 2.2], [2.3, 2.4, 2.51], [1.5] * 3], TEXT),
    "gates of whole models": results([[0.1] * 3, [0.5] * 3, [0.7, 0.71, 0.72]], DEFAULTS["masked"]),
    "scores by length": results([[0.5], [1.0], [0.9]], REVERSE, by_length=LENGTHS),
    "a mean over seeds by length": results([[0.4, 0.6]], REVERSE, by_length=[{"6": 0.9, "12": 0.89}]),
    "losses by length": results([[3.25]], TEXT, by_length=[{"96": 3.25, "6144": 4.5}]),
    "sizes that differ": sized((2000, 1000, 3000), (100, 475, 100), (500, 520, 510)),
    "sizes of nothing and not counted": sized((1000, 1050), (0, 0), (None, 520)),
    "a size of nothing beside another": sized((1000, 1051), (0, 8), (500, 1000)),
    "two points above chance": results([[1 / 32 + 0.019, 1 / 32], [0.9, 0.91]]),
    "more than two points above chance": results([[1 / 32 + 0.021], [0.9]]),
    "one head takes nearly all": results([[0.5, 0.5], [0.9, 0.91]], gates=gates([0.96, 0.04])),
    "one head takes less than 95 %": results([[0.5], [0.9]], gates=gates([0.94, 0.06])),
    "a head takes nearly nothing": results([[0.5], [0.9]], gates=gates([0.58, 0.417, 0.003])),
    "a head takes little": results([[0.5], [0.9]], gates=gates([0.58, 0.416, 0.004])),
    "gates that choose nothing": results([[0.5], [0.9]], gates=gates([0.5, 0.5], 0.9991)),
    "gates that hardly choose": results([[0.5], [0.9]], gates=gates([0.5, 0.5], 0.998)),
}


def sentences():
    for title, data in COMPARISONS.items():
        (comparison,) = summarize(data)
        tests = judged([comparison])
        yield from (f"## {title}", "", headline([comparison], tests), *conditions(comparison))
        yield from (f"| {' | '.join(line)} |" for line in differences.table(tests[0], "comparison"))
        yield from ("", *(f"- {sentence}" for sentence in findings(comparison)), "")
        yield from (line for part in by_length(comparison) for line in section_text(part))
    for seeds in (1, 3):
        comparisons = summarize(many(seeds, tuple(zoo.names())))
        said = [headline(comparisons, judged(comparisons)), *findings(comparisons[0])]
        yield from (f"## the whole zoo, {seeds} seeds", "", *said, "")
        yield from (f"{name}: {', '.join(c.label for c in own)}" for name, own in comparisons[0].families())


def sweeps():
    several = {
        4: [[0.99, 0.98, 0.985], [1.0, 0.97, 0.995]], 16: [[0.5, 0.52, 0.51], [0.8, 0.84, 0.8]],
        32: [[0.03, None, None], [0.3, 0.2, 0.1]],
    }  # fmt: skip
    for data in (swept(several), swept({"a": [[0.5], [None]], "b": [[0.4], [None]]})):
        yield from as_text(report(data, None))
        yield from (*of_sweep(Sweep.of(data)), "")


def terminal():
    for data in (rates(), results([[0.5, 0.5], [0.9, 0.91]])):
        screen = Console(file=io.StringIO(), width=160)
        print_sections(report(data, None), screen)
        yield from screen.file.getvalue().splitlines()


def as_text(page):
    """Everything that a page says, without its pictures."""
    yield from (f"# {page.title}", "", str(page.answer), *page.about, "")
    for section in page.sections:
        yield from section_text(section)


def section_text(section):
    about = [one for one in section.about if one]
    yield from (f"## {section.title}", "", *about, *([Markup(section.content).striptags()] if section.content else []))
    yield from (f"| {' | '.join(map(str, line))} |" for line in (section.header, *section.rows))
    yield from ("", *(f"- {sentence}" for sentence in section.sentences), str(section.listing or ""))
    yield from section_text(section.details) if section.details else ()


# --- a plan ----------------------------------------------------------------------------------------------------------
CURVES = [row("a", 0, 0.9, by_length={8: 1.0, 16: 0.95, 32: 0.75, 64: 0.95}), row("a", 1, None),
          row("b", 0, 0.9, by_length={8: 0.9, 16: 0.9, 32: 0.9, 64: 0.9}),
          row("b", 1, 0.9, by_length={8: 0.89, 16: 1.0, 32: math.nan, 64: 0.9}),
          row("b", 2, 0.9, trial=True)]  # fmt: skip
LOSSES = [
    row(mixer, seed, 2.0 + extra, scores={"loss": 2.0, "loss on repeats": 1.0 + extra}, by_length={8: 2.5, 1024: far})
    for mixer, extra, lengths in (("a", 0.1, (3.0, math.nan, 3.5)), ("b", 0.0, (3.0, 3.1, math.inf)))
    for seed, far in enumerate(lengths)
]
PAIRS = (("a", "b"), ("a", "c"))
PLANNED = {
    "two differences": (question(pairs=PAIRS), rows(a=[0.9, 0.8, 0.95], b=[0.5, 0.6, 0.65], c=[0.7, 0.9, 0.6])),
    "by signed ranks": (question(test="wilcoxon"), rows(a=[0.9, 0.8, 0.95], b=[0.5, 0.6, 0.65])),
    "told apart": (question(), rows(a=[0.9, 0.8, 0.95, 0.9], b=[0.1, 0.02, 0.1, 0.12])),
    "one seed": (question(), rows(a=[0.9], b=[0.5])),
    "equal differences of three seeds": (question(), rows(a=[0.93, 1.01, 0.57], b=[0.43, 0.51, 0.07])),
    "equal differences of six seeds": (question(), rows(a=[0.6] * 6, b=[0.1] * 6)),
    "ties": (question(test="wilcoxon"), rows(a=[0.5, 0.75, 0.5, 0.25, 1.0], b=[0.25, 0.5, 0.5, 0.5, 0.5])),
    "runs diverged": (question(pairs=(("a", "b"), ("c", "b"))),
                      rows(a=[0.5, 0.6, 0.8, None], b=[0.2, 0.3, 0.5, 0.3], c=[None] * 2)),
    "every run diverged": (question(), rows(a=[None] * 2, b=[None] * 2)),
    "a seed that only one has": (question(), rows(a=[0.9, 0.8, 0.95, 0.1], b=[0.5, 0.6, 0.65])),
    "the length held": (question("capacity"), CURVES),
    "losses, some of which are not finite": (question("losses"), LOSSES),
    "speed": (question("speed"), [row("a", 0, 0.9, reached=30), row("b", 0, 0.5), row("b", 1, 0.9, reached=70)]),
    "two comparisons": (question(), [*rows(a=[0.9, 0.8], b=[0.5, 0.6]),
                                     *(one | {"comparison": "q"} for one in rows(a=[0.7, 0.8], b=[0.5, 0.65]))]),
}  # fmt: skip


def planned():
    alone = ([case] for case in PLANNED.values())
    together = ("two studies, which are one family", [PLANNED["told apart"], PLANNED["by signed ranks"]])
    for title, studies in (*zip(PLANNED, alone, strict=True), together):
        yield from (f"## {title}", "")
        for (asked, runs), tests in zip(studies, hypotheses.differences(studies), strict=True):
            yield hypotheses.answer(asked, tests)
            for section in hypotheses.sections(asked, runs, tests):
                yield from section.about
                yield from (f"| {' | '.join(line)} |" for line in (section.header, *section.rows))
        yield ""


# --- eval ------------------------------------------------------------------------------------------------------------
HALF, ALL = [1.0, 0.0] * 50, [1.0] * 100
WORDS = [[-2.0, 3.0], [-6.0, 5.0], [-1.0, 1.0]] * 5
EVALUATIONS = {
    "better, and at chance": {"a": record(HALF, choices=(2,)), "b": record(ALL, choices=(2,))},
    "too few rows to tell": {"a": record([1.0, 1.0, 0.0, 1.0, 1.0]), "b": record([1.0] * 5)},
    "nine rows": {"a": record([0.0] * 9, choices=(1,)), "b": record([1.0 - i / 100 for i in range(9)], choices=(1,))},
    "ten rows": {"a": record([0.0] * 10, choices=(1,)), "b": record([1.0 - i / 100 for i in range(10)], choices=(1,))},
    "equal on every row": {"a": record([1.0, 0.0]), "b": record([1.0, 0.0])},
    "right as often as chance is": {"a": record([1.0] * 36 + [0.0] * 64, choices=(2, 5, 5, 5))},
    "right more often than by chance": {"a": record([1.0] * 38 + [0.0] * 62, choices=(2, 5, 5, 5))},
    "nothing found": {"a": record([0.0] * 5, "contains", (1,))},
    "perplexities": {"a": record(WORDS, "word_perplexity", (1,), {"word_perplexity": 50.0}),
                     "b": record([[x - 0.3, w] for x, w in WORDS], "word_perplexity", (1,), {"word_perplexity": 2})},
    "bits": {"a": record(WORDS, "bits_per_byte", (1,))},
    "one row": {"a": record([[-2.0, 3.0]], "byte_perplexity", (1,))},
    "other rows": {"a": record([1.0, 0.0]), "b": record([1.0, 0.0], rows="other ")},
    "not finite": {"a": record([1.0, 0.0]), "b": record([math.nan, 0.0])},
    "infinite": {"a": record([-2.0] * 10, "perplexity", (1,)), "b": record([-math.inf] * 10, "perplexity", (1,))},
}  # fmt: skip


def evaluations():
    from headrace.evaluation.report import against_the_first, findings, table
    from headrace.evaluation.run import Evaluation, EvaluationPlan

    for title, models in EVALUATIONS.items():
        evaluation = Evaluation(EvaluationPlan("x"), {model: {"task": own} for model, own in models.items()}, {})
        judged = against_the_first(evaluation)
        pairs = differences.table(judged, "task") if judged else []
        yield from (f"## {title}", "", differences.answer(judged))
        yield from (f"| {' | '.join(line)} |" for line in (*table(evaluation), *pairs))
        yield from ("", *(f"- {sentence}" for sentence in findings(evaluation)), "")


PAGES = {
    "sentences": sentences, "report": lambda: as_text(report(rates(), None)), "sweeps": sweeps, "terminal": terminal,
    "planned": planned, "evaluations": evaluations,
}  # fmt: skip


def text(name):
    return "\n".join(map(str, PAGES[name]())).rstrip() + "\n"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_its_golden_file_says(name):
    assert text(name) == (GOLDEN / f"{name}.txt").read_text("utf-8")


def test_every_golden_file_belongs_to_a_page():
    assert {path.stem for path in GOLDEN.iterdir()} == PAGES.keys()


if __name__ == "__main__":
    for name in PAGES:
        (GOLDEN / f"{name}.txt").write_text(text(name), "utf-8")
