"""The tables of docs/appendix.md are those of their runs, and the examples of `compare` fit the tasks."""

import json
import shlex
from itertools import groupby
from pathlib import Path
from statistics import median

import pytest

import rates
from headrace.cli.app import GROUPS
from headrace.studies.compare.choose import choose
from headrace.studies.compare.defaults import DEFAULTS
from headrace.studies.compare.rows import read
from headrace.training import recipes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "appendix.md").read_text("utf-8")
RUNS = read(ROOT / "benchmarks" / "results" / "defaults.csv")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SEARCHED = [run for run in RUNS if "-lr-" in run["comparison"]]
REPORTED = [run for run in RUNS if run["comparison"] in DEFAULTS]


def score(run):
    found = f"{run['score']:.3f} nats" if run["metric"] == "loss" else f"{100 * run['score']:.1f}"
    return found + ("" if run["converged"] else "*")


def searched():
    """The lines of the table of learning rates: one for each task and mixer; in a cell, one score for each seed."""
    found = {}
    for run in SEARCHED:
        task, _, rate = run["comparison"].partition("-lr-")
        assert float(rate) == run["lr"]
        cells = found.setdefault((f"`{task}`", str(run["steps"]), run["mixer"]), {rate: [] for rate in RATES})
        cells[run["lr"]].append(score(run))
    return [f"| {' | '.join([*key, *map(', '.join, cells.values())])} |" for key, cells in sorted(found.items())]


def reported():
    """The lines of the table of the defaults: one for each task."""
    for task, runs in groupby(REPORTED, lambda run: run["comparison"]):
        arms = list(runs)
        steps, lr = arms[0]["steps"], arms[0]["lr"]
        scores = ", ".join(f"{run['mixer']} {score(run)}" for run in arms)
        converged = f"{sum(run['converged'] for run in arms)} of {len(arms)}"
        command = f"`headrace compare --task {task} --seeds 1`"
        yield f"| `{task}` | {steps} | {lr:g} | {converged} | {scores} | {command} |"


def tables(first):
    """The lines below the header that begins with `first`, without its rule."""
    block = PAGE[PAGE.index(f"| task | steps | {first}") :].partition("\n\n")[0]
    return block.splitlines()[2:]


def test_the_table_of_learning_rates_is_that_of_its_runs():
    assert tables("mixer") == searched()


def test_the_table_of_defaults_is_that_of_its_runs():
    assert tables("lr") == list(reported())


@pytest.mark.parametrize("task", dict.fromkeys(run["comparison"] for run in REPORTED))
def test_the_runs_are_those_of_the_default(task):
    plan, runs = DEFAULTS[task], [run for run in REPORTED if run["comparison"] == task]
    assert tuple(run["mixer"] for run in runs) == plan.mixers
    assert {(run["steps"], run["lr"], run["seed"]) for run in runs} == {(plan.recipe.steps, plan.recipe.lr, 0)}


@pytest.mark.parametrize("task", dict.fromkeys(run["comparison"].partition("-lr-")[0] for run in SEARCHED))
def test_a_default_takes_the_rate_with_the_lowest_sum_of_losses(task):
    """Of the medians over seeds, at the rates that every mixer of the search was trained with."""
    found = {}
    for run in SEARCHED:
        if run["comparison"].startswith(f"{task}-lr-"):
            found.setdefault(run["lr"], {}).setdefault(run["mixer"], []).append(run["loss"])
    mixers = max(map(len, found.values()))
    sums = {rate: sum(map(median, own.values())) for rate, own in found.items() if len(own) == mixers}
    assert len(sums) > 1 and DEFAULTS[task].recipe.lr == min(sums, key=sums.__getitem__)


@pytest.mark.parametrize("recipe", ["laptop-1m", "laptop-5m"])
def test_a_recipe_takes_the_rate_with_the_lowest_sum_of_losses(recipe):
    """At the recipe's own tokens a step, and at the rates that all its mixers were trained with."""
    own, _ = recipes.load(recipe)
    tried = [found for key, found in rates.losses().items() if key[0] == recipe and key[3] == own.batch_tokens]
    common = set.intersection(*map(set, tried))
    assert len(common) > 2 and own.lr == min(common, key=lambda rate: sum(found[rate] for found in tried))


def test_what_the_reproductions_gain_by_the_rate():
    found, page = (
        rates.losses()["laptop-1m", "gla", 400_000, 2048],
        (ROOT / "docs" / "appendix.md").read_text("utf-8"),
    )
    assert f"comes to {found[1e-2]:.3f} nats there at 1e-2, and to {found[3e-3]:.3f} at 3e-3" in page


def test_a_table_of_rates_is_that_of_its_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(rates, "RESULTS", tmp_path / "rates.csv")
    runs = []
    for lr, loss in ((0.01, 4.25), (0.001, 4.5)):
        runs.append(tmp_path / f"{lr:g}")
        settings = {"mixer": "gla", "lr": lr, "tokens": 4e6, "batch_tokens": 8192, "seed": 100}
        write(runs[-1] / "run.json", {"recipe": settings})
        points = [{"loss": 8.0}, {"train_runtime": 12.5}, {"final_loss": loss}]
        write(runs[-1] / "model" / "history.json", [{"step": 488} | point for point in points])
    rates.keep("laptop-1m", runs, "abc1234")
    assert rates.lines()[0].endswith("| lr 0.001 | lr 0.01 |")
    assert rates.lines()[2:] == ["| `laptop-1m` | `gla` | 4,000,000 | 8,192 | 4.500 | 4.250 |"]


def write(path, found):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), "utf-8")


def test_the_seeds_of_the_search_are_none_of_those_reported():
    seeds = {run["seed"] for run in SEARCHED}
    assert all(seeds.isdisjoint(plan.seed_numbers) for plan in DEFAULTS.values())


def test_every_default_is_reported():
    """`pair` by its studies."""
    assert {run["comparison"] for run in REPORTED} | {"pair"} == DEFAULTS.keys()


def test_every_default_is_searched():
    """`pair` and `text` by their studies."""
    assert {run["comparison"].partition("-lr-")[0] for run in SEARCHED} | {"pair", "text"} == DEFAULTS.keys()


def test_what_the_questions_say_of_step_sizes():
    """Gated DeltaNet's own find no needle at three rates; smaller ones half of them, and twice the steps 126 of 128."""
    runs = [run for run in RUNS if run["comparison"].startswith("needle")]
    smaller = "gated-deltanet(decay.dt_min=1e-5, decay.dt_max=1e-3)"
    found = {(run["mixer"], run["steps"], run["lr"]): run["score"] for run in runs}
    assert [found["gated-deltanet", 1000, lr] for lr in (3e-4, 1e-3, 3e-3)] == [0] * 3
    assert (found[smaller, 1000, 1e-3], found[smaller, 2000, 1e-3]) == (0.5, 126 / 128)
    assert smaller in (ROOT / "docs" / "faq.md").read_text("utf-8")


@pytest.mark.parametrize("example", [e for e in GROUPS["Compare"]["compare"].examples if "--task" in e])
def test_the_examples_of_compare_fit_their_tasks(example):
    words = shlex.split(example)
    options = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    task, sweep = options.pop("task"), options.pop("sweep", None)
    for plan in choose(task, [], None, options, sweep).plans:
        plan.check()
