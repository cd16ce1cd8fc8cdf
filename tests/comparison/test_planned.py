"""Studies that are written down first: the plan's file, the search for a learning rate, and the rows."""

import json
import shlex
from dataclasses import replace

import pytest

from headrace.cli.app import GROUPS
from headrace.comparison import rows as table
from headrace.comparison.arm import Curve, begin, train
from headrace.comparison.choose import choose, planned
from headrace.comparison.model import build
from headrace.comparison.page import write_report
from headrace.comparison.plan import ArmRecipe, Plan, Question, Shape, Study, Tuning
from headrace.comparison.run import complete
from headrace.comparison.tuning import at_edge, best
from headrace.files.provenance import claim
from headrace.tasks import Pair, Text
from headrace.utils.errors import InputError
from stored import question

SMALL = Plan(
    "small", ("retnet", "softmax-retnet"), Pair(keys=6, pairs=4, queries=4), Shape(hidden_size=16, heads=4, mlp=0),
    ArmRecipe(steps=3, batch_size=4, evaluations=3, held_out=8), seeds=(3, 5), tuning=Tuning("lr", (1e-3, 1e-1), (7,)),
)  # fmt: skip
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


# --- the plan's file -------------------------------------------------------------------------------------------------
def test_a_plan_is_the_options_of_compare_and_a_question(tmp_path):
    (path := tmp_path / "mine.yaml").write_text(PLAN, encoding="utf-8")
    study = planned(path)
    a, b, c, d = study.plans[0].mixers
    assert (study.name, a, d) == ("mine", "retnet(heads.expand_v=1)", "softmax-gla(heads.expand_v=1)")
    assert study.question.pairs == ((b, a), (d, c)) and study.question.name(d) == "gla softmax"
    assert [(p.task.pairs, p.recipe.steps, p.seed_numbers) for p in study.plans] == [(2, 7, (1, 2)), (4, 7, (1, 2))]
    assert study.plans[0].tuning == Tuning("lr", (1e-3, 1e-2), (8, 9))
    path.write_text(PLAN.replace("mixers:\n", "mixers:\n  control: transformer\n"), encoding="utf-8")
    assert planned(path).question.name("transformer") == "control", "of both backbones"
    assert Question.stored({"study": json.loads(json.dumps(study.to_json()))}) == study.question


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps: 7", "setps: 7", "sets 'setps', which is no option; did you mean 'steps'"),
        ("softmax - none", "softmax - nothing", "'softmax - nothing' under `compare`; expected NAME - NAME"),
        ("softmax - none", "softmax", "expected NAME - NAME"),
        ("question: Does it help?", "", "is no plan: it has no 'question'"),
        ("compare: [softmax - none]", "compare: none", """is no plan: 'compare' is "none", not a list"""),
        ('}(heads.expand_v=1)"', '},gla"', "'retnet,gla' under `mixers`; expected one mixer under each name"),
        ("retnet}, {backbone: gla", "a=1}, {backbone: a=2", "two mixers are named 'none'; expected `over` to"),
        ("softmax - none", "none - none", "'none - none' under `compare`; expected NAME - NAME, two mixers of none"),
        ("task: pair(least=1)", "task: 3", "is no plan: 'task' is 3, not a text"),
        ("{backbone: gla}", "{bone: gla}", "{'bone': 'gla'} under `over` do not fit the mixers: KeyError: 'backbone'"),
        ("seeds: 1-2", "seeds: 2.5", "is no plan: 'seeds' is 2.5, not an integer"),
        ("\nseeds: 1-2", "\nseeds: 0", "--seeds=0; expected more than 0"),
        ("seeds: 1-2", "seeds: [1, 1]", "--seeds=(1, 1); expected different ones from 0 to 4294967295"),
        ("seeds: 1-2", "seeds: 4294967296-4294967297", "expected different ones from 0 to 4294967295"),
        ("compare: [softmax - none]", "compare: []", "nothing under `compare`"),
        ("measure: capacity", "measure: size", "measure='size' is not allowed; expected one of score, losses, speed"),
        ("tune_seeds: 8-9", "tune_seeds: 2-3", "seed 2 is among those of the search and those reported"),
        ("tune_seeds: 8-9", "tune_seeds: 9-8", "--tune-seeds '9-8' names none; expected different seeds"),
        ("tune: lr=1e-3,1e-2", "tune: heads=3", "expected FIELD=VALUE,VALUE,… with a field such as lr"),
        ("tune: lr=1e-3,1e-2", "", "--tune-seeds 8-9 needs a search"),
        ("task: pair(least=1)", "task: pair", "measure: capacity, but the task pair is tested at one length"),
        ("measure: capacity", "measure: losses", "measure: losses, but the score of the task pair is accuracy"),
        ("task: pair(least=1)\nsweep: pairs=2,4", "task: text(length=16, longest=64)",
         "measure: capacity, but less is better of the loss of the task text"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused(old, new, says, tmp_path):
    (path := tmp_path / "mine.yaml").write_text(PLAN.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError) as error:
        for plan in planned(path).plans:
            plan.check()
    assert says in str(error.value)


@pytest.mark.parametrize(
    "example", [e for e in GROUPS["Compare"]["compare"].examples if "--task" in e and "--plugin" not in e]
)
def test_the_examples_of_compare_fit_their_tasks(example):
    words = shlex.split(example)
    options = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    task, sweep = options.pop("task"), options.pop("sweep", None)
    for plan in choose(task, sweep=sweep, **options).plans:
        plan.check()


# --- the search ------------------------------------------------------------------------------------------------------
def test_a_search_has_seeds_of_its_own_and_every_mixer_takes_its_best_rate():
    (plan,) = choose("pair", seeds="3-4", tune="lr=1e-3, 1e-2").plans
    assert plan.tuning == Tuning("lr", (1e-3, 1e-2), (5, 6, 7))
    assert [(t.name, t.recipe.lr, t.seed_numbers) for t in plan.trials()] == [
        ("pair-lr-0.001", 1e-3, (5, 6, 7)), ("pair-lr-0.01", 1e-2, (5, 6, 7)),
    ]  # fmt: skip
    losses = {"a": [(3, 2, 4), (1, 20, 2.5)], "b": [(1, 1, 1), (2, None, 2)], "c": [(None,), (None,)]}
    trials = [
        {"comparison": trial.name, "mixer": mixer, "scores": {} if loss is None else {"loss": loss}}
        for mixer, by_value in losses.items()
        for trial, own in zip(plan.trials(), by_value, strict=True)
        for loss in own
    ]
    taken = best(replace(plan, mixers=tuple(losses)), trials)
    assert taken == {"a": 1e-2, "b": 1e-3, "c": 1e-3}, "medians 3 and 2.5, 1 and 2, and none"
    assert at_edge((1, 2, 3), 3) and at_edge((1, 2, 3), 1) and not at_edge((1, 2, 3), 2)
    assert at_edge(("none", 1.0, 2.0), 2.0) and not at_edge(("none", 1.0), "none") and not at_edge(("a", "b"), "a")


def test_a_run_on_one_held_out_row_has_a_score_at_every_length():
    recipe = replace(SMALL.recipe, steps=1, evaluations=1, held_out=1)
    plan = replace(SMALL, task=Pair(keys=6, pairs=2, least=1), recipe=recipe, seeds=1, tuning=None)
    by_length = train(plan.arms()[0], lambda step, scores: None)[1]["by_length"]
    assert {length: 0 <= score <= 1 for length, score in by_length.items()} == {"2": True, "4": True}


@pytest.mark.parametrize("task", ["pair(least=8)", "digits"])
def test_a_search_is_evaluated_on_rows_that_are_not_reported(task):
    (plan,) = choose(task, held_out=1024, tune="lr=1e-3, 1e-2").plans
    rows = [Curve(of.arms()[0], None, lambda *news: None).held_out["input_ids"] for of in (*plan.trials(), plan)]
    first, second, reported = ({tuple(row) for row in ids.flatten(1).tolist()} for ids in rows)
    assert first == second and not first & reported and min(len(first), len(reported)) > 100


def test_reported_runs_train_with_the_best_rate_and_a_finished_study_is_kept(tmp_path):
    study = Study("s", "S", (SMALL,), question=question(pairs=(("softmax-retnet", "retnet"),)))
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
    for said in ("small: search", "neither these seeds nor these rows are reported", "The statistic of the plan"):
        assert said in page
    found = table.read(tmp_path / "runs.csv")
    assert found == [{name: r[name] for name in table.COLUMNS} for r in table.rows(results)]
    assert [r["trial"] for r in found] == [True] * 4 + [False] * 4
    assert [r["score"] for r in found[4:]] == [arm["scores"]["accuracy"] for arm in results["arms"]]
    heard.clear()
    assert complete(study, tmp_path, lambda *news: heard.append(news), ["cpu"])["arms"] == results["arms"]
    assert all(step == SMALL.recipe.steps for _, step, _ in heard), "nothing was trained again"


def test_an_arm_begins_with_the_weights_of_one_without_gates():
    heard, apart = [], replace(SMALL, seeds=(3,), tuning=None)
    plain, gated = apart.arms()
    weights = train(plain, lambda step, scores: heard.append(scores))[0].state_dict()
    train(gated, lambda step, scores: heard.append(scores), weights=weights)
    before, after = heard[: len(heard) // 2], heard[len(heard) // 2 :]
    assert after[0] == before[-1] != before[0], "its gates begin at 1"
    assert after[-1]["loss"] < after[0]["loss"]
    with pytest.raises(AssertionError, match="o_proj"):
        begin(build(gated), {name: value for name, value in weights.items() if "o_proj" not in name})


# --- the rows ---------------------------------------------------------------------------------------------------------
def test_a_row_has_the_first_step_with_a_score_of_nine_tenths():
    arm = {"mixer": "a", "diverged": False, "scores": {"accuracy": 0.95, "loss": 0.2}, "curve": [
        {"step": s, "scores": {"accuracy": x, "loss": 1 - x}} for s, x in ((0, 0.1), (10, 0.9), (20, 0.8), (30, 0.95))
    ]}  # fmt: skip
    found = table.row(arm, Pair.metric, False)
    assert (found["reached"], found["score"], found["loss"]) == (10, 0.95, 0.2)
    assert table.row(arm, Text.metric, False)["reached"] is None
    never = table.row(arm | {"curve": arm["curve"][:1]}, Pair.metric, False)
    assert never["reached"] is None
