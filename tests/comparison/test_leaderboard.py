"""The leaderboard: rows of a suite that do not depend on each other, their tables, and the time that is said before."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace import InputError, tasks
from headrace.comparison import defaults, leaderboard, run
from headrace.comparison import rows as runs
from headrace.comparison.model import build
from headrace.files import engine
from headrace.files.workers import Worker
from headrace.training import processes
from headrace.training.parameters import gate_parameters
from plugged import folder  # noqa: F401

TINY = tuple(
    replace(plan, recipe=replace(plan.recipe, steps=6, batch_size=4, held_out=8), seeds=2)
    for plan in (defaults.SMALL[0], replace(defaults.SMALL[-1], task=tasks.Text(length=16)))
)


@pytest.fixture
def tiny(monkeypatch):
    """A small suite, whose models are trained in this process."""

    def distribute(call, jobs, devices, listen):
        for i, job in enumerate(jobs):
            call(*job, Worker(devices[0], partial(listen, i)))

    monkeypatch.setitem(defaults.SUITES, "tiny", TINY)
    monkeypatch.setattr(engine, "distribute", distribute)


def made(mixer, seed, accuracy, definition="same", **more):
    row = dict.fromkeys(leaderboard.COLUMNS) | {"by_length": {}, "scores": {"accuracy": accuracy}, "trial": False}
    sizes = {"parameters": 100, "state_bytes": 10, "seconds": 6.0, "lr": 3e-3}
    return row | sizes | {"comparison": "parity", "mixer": mixer, "seed": seed, "definition": definition} | more


def test_a_row_has_the_machine_that_made_it():
    """Two machines with one commit. Results of older versions have the commit alone."""
    machines = [dict.fromkeys(leaderboard.MADE) | {"commit": "c", "processor": name} for name in ("first", "second")]
    arms = [{"scores": {}, "curve": [], "diverged": True, "comparison": "parity", "environment": i} for i in (1, 0)]
    study = leaderboard.of_mixer("small", "retnet").to_json()
    assert any(plan["name"] == "parity" for plan in study["plans"])
    results = {"study": study, "environments": machines, "trials": [], "arms": [arm | {"commit": "c"} for arm in arms]}
    assert [row["processor"] for row in leaderboard.of_results(results)] == ["second", "first"]
    for arm in results["arms"]:
        del arm["environment"]
    assert [row["processor"] for row in leaderboard.of_results(results)] == ["second", "second"]


@pytest.mark.slow(seconds=15)
def test_a_newcomer_gets_its_row_beside_those_of_others_by_one_command(tiny, folder, succeeds):  # noqa: F811
    today, board = leaderboard.definition(leaderboard.defined("tiny")["parity"]), Path("board.csv")
    others = [made("retnet", 0, 0.75, today, by_length={32: 0.75, 128: 0.5}), made("retnet", 0, 0.5, comparison="text")]
    runs.write(others, board, leaderboard.COLUMNS)
    newcomer = ["compare", "--suite", "tiny", "--workers", 1, "--plugin", "fading.py", "--mixers", "fading-delta"]
    newcomer += ["--board", board, "--output", "out"]
    shown = succeeds(*newcomer).out
    assert re.search(r"fading-delta: 10 models to train, about \d+ min with 1 worker", shown)
    rows = runs.read(Path("out", "leaderboard.csv"))
    assert [row["scores"]["accuracy"] for row in rows if row["mixer"] == "retnet"] == [0.75], "its text was another"
    own = [row for row in rows if row["mixer"] == "fading-delta"]
    assert Counter(row["comparison"] for row in own if not row["trial"]) == {"parity": 2, "text": 2}
    assert len(own) == 10 and all("plugin fading.py" in row["plugins"] and row["torch"] for row in own)
    assert re.search(r"retnet +│ 75.0 \(75.0–75.0\) 0/1 +│ +– ", shown), shown
    assert "At 4 times the training length" in shown and "guessing" in shown and "are left out: text" in shown
    assert {p.name for p in Path("out").iterdir()} == {"fading-delta", "leaderboard.csv", "leaderboard.html"}
    assert "fading-delta: 0 models" in succeeds(*newcomer).out, "finished rows are shown again"


def test_every_model_of_the_suite_has_as_many_parameters_as_the_transformers():
    for plan in (defaults.SMALL[0], defaults.SMALL[5]):
        sizes = []
        for mixer in ("transformer", "gla", "mamba2", "rwkv7", "softmax-gla"):
            (arm,) = replace(plan, mixers=(mixer,), seeds=1).arms()
            model = build(arm)
            sizes.append(sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in gate_parameters(model)))
        assert max(sizes) <= 1.01 * min(sizes), (plan.name, sizes)


def test_a_mixer_that_is_larger_than_the_reference_is_refused():
    plan = replace(defaults.SMALL[0], mixers=("gla(heads.expand_v=8)",))
    with pytest.raises(InputError, match="with the narrowest MLP; expected at most target="):
        plan.widths()


def test_steps_are_timed_on_the_device_of_the_workers(tiny, monkeypatch):
    """Which is not the first GPU, whose number is the current one of a process. The GPUs are a stand-in."""
    chosen, places = [0], []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(processes, "present_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: chosen[-1])
    trained = {"speeds": [1.0], "seconds": 1.0}
    monkeypatch.setattr(run, "train", lambda *given: places.append(processes.device_of_this_process()) or (0, trained))
    run.timed(leaderboard.of_mixer("tiny", "gla").plans[0].arms()[0], "cuda:1")
    assert places == [torch.device("cuda:1")]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_time_is_that_of_the_timed_steps_multiplied(tiny, tmp_path, monkeypatch, workers):
    """Of each task, 3 rates with one seed and 2 seeds: 5 models of 6 steps."""
    seconds = {TINY[0].task: (0.5, 1.0), TINY[1].task: (0.06, 5.0)}
    monkeypatch.setattr(run, "timed", lambda arm, device: seconds[arm.plan.task])
    own = leaderboard.of_mixer("tiny", "gla")
    arms, duration = run.duration(own, tmp_path, ["cpu"] * workers)
    assert arms == 10 and duration == pytest.approx((5 * (6 * 0.5 + 1) + 5 * (6 * 0.06 + 5)) / workers)
    done = tmp_path / own.plans[0].arms()[0].result
    done.parent.mkdir(parents=True)
    done.write_text("{}")
    arms, rest = run.duration(own, tmp_path, ["cpu"] * workers)
    assert arms == 9 and duration - rest == pytest.approx((6 * 0.5 + 1) / workers), "what is finished is not counted"


def test_rows_are_merged_by_mixer_and_refused_if_the_suite_is_another():
    old = [made("gla", 0, 0.5), made("gla", 1, 0.5), made("deltanet", 0, 0.5)]
    rows = leaderboard.merged(old, [made("gla", 0, 0.9)])
    assert [(row["mixer"], row["scores"]["accuracy"]) for row in rows] == [("deltanet", 0.5), ("gla", 0.9)]
    with pytest.raises(InputError, match="rows of deltanet and kda have different definitions of 'parity'"):
        leaderboard.merged(old, [made("kda", 0, 1.0, "other")])


def test_a_file_of_a_newer_version_may_have_more_columns(tmp_path):
    board = tmp_path / "board.csv"
    runs.write([made("gla", 0, 0.5) | {"later": "x"}], board, (*leaderboard.COLUMNS, "later"))
    rows = leaderboard.others(board)
    runs.write(rows, board, leaderboard.COLUMNS)
    assert leaderboard.others(board) == rows and rows[0]["scores"] == {"accuracy": 0.5}


def test_a_cell_has_the_median_the_extremes_and_the_seeds_that_solve():
    plan = leaderboard.defined("small")["parity"]
    rows = [made("gla", seed, score) for seed, score in enumerate((0.95, 0.5, 1.0, 0.94, 0.9499))]
    near = lambda: leaderboard.cell(leaderboard.scores(rows, plan), leaderboard.metric_of(plan))  # noqa: E731
    assert near() == "95.0 (50.0–100.0) 2/5"
    rows[1]["scores"] = {}
    assert near() == "95.0 (94.0–100.0) 2/5 (1 diverged)"
    rows[:] = []
    assert near() == "–"
    far = [made("gla", 0, 0.9, by_length={32: 0.9, 128: 0.6})]
    assert leaderboard.scores(far, plan, 4) == [0.6] and leaderboard.scores(rows, plan, 4) == []
    assert leaderboard.rates([made("gla", 0, 0.9, lr=3e-3)], plan) == "0.003*"
    assert leaderboard.rates([made("gla", 0, 0.9, lr=6e-3)], plan) == "0.006"


def test_what_the_rows_depend_on_is_not_changed_unnoticed():
    """The committed rows are of today's suite; that of the text also depends on the Python that has it."""
    today = leaderboard.definitions(leaderboard.defined("small").values())
    rows = leaderboard.others(None)
    assert {row["comparison"] for row in rows} == set(today)
    assert all(row["definition"] == today[row["comparison"]] for row in rows if "text" not in row["comparison"])
