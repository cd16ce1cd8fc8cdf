"""Does competition pay when it is added late? RetNet is trained on recall without gates, then gates of 1 are added.

    python benchmarks/retrofit.py           rows into results/studies/retrofit.csv; continues what is in runs/retrofit
    python benchmarks/study.py show retrofit

The first half of training is the arm without gates of the study capacity-retnet, the second has as many steps of other
rows and a learning rate that is searched for every arm on seeds that are not reported.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor

import study
from headrace.studies.compare import rows, tuning
from headrace.studies.compare.arm import train
from headrace.studies.compare.plan import Arm, Plan
from headrace.studies.compare.question import Question
from headrace.utils.integrity import read_result

BASE, ARMS = "capacity-retnet", ("none", "wide sigmoid", "softmax")
LATER = 1000  # added to a seed for the second half, which has other rows
FOLDER, RESULTS = Path("runs", "retrofit"), study.kept("retrofit")
PAIRS = (("softmax", "none"), ("softmax", "wide sigmoid"), ("wide sigmoid", "none"))


def run(folder: Path = FOLDER) -> None:
    torch.set_num_threads(1)
    (first,) = study.plan(BASE).plans
    later = second(first)
    trials = [continued(arm, first, folder) for trial in later.trials() for arm in trial.arms()]
    arms = [continued(arm, first, folder) for arm in later.arms(tuning.best(later, trials))]
    listed = [(arm, True) for arm in trials] + [(arm, False) for arm in arms]
    rows.write([rows.row(arm, first.task.metric, trial) for arm, trial in listed], RESULTS)


def question() -> Question:
    names = {name: mixer for mixer, name in study.question(BASE).names}
    return Question(
        "Does RetNet hold more pairs with gates that are added halfway?",
        tuple((names[name], name) for name in ARMS), tuple((names[a], names[b]) for a, b in PAIRS), "capacity",
    )  # fmt: skip


def second(first: Plan) -> Plan:
    """The plan of the second half of training."""
    assert first.tuning is not None
    searched = replace(
        first.tuning, values=(1e-3, 3e-3, 1e-2), seeds=tuple(LATER + seed for seed in first.tuning.seeds)
    )
    mixers, seeds = tuple(mixer for mixer, _ in question().names), tuple(LATER + seed for seed in first.seed_numbers)
    return replace(first, name="retrofit", mixers=mixers, seeds=seeds, tuning=searched)


def continued(arm: Arm, first: Plan, folder: Path) -> dict[str, Any]:
    """The result of an arm of the second half."""
    if not (path := arm.result(folder)).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        half = replace(first, part=arm.plan.part)
        train(arm, path, lambda step, scores: None, weights=begun(half, arm.seed - LATER, folder))
        print(f"{arm.plan.name}: {question().name(arm.mixer)}, seed {arm.seed}", flush=True)
    found = read_result(path)
    return found | {"commit": found["environment"]["commit"]}


def begun(first: Plan, seed: int, folder: Path) -> dict[str, Tensor]:
    """The weights after the first half, with the learning rate that the study took."""
    mixer = question().names[0][0]
    (lr,) = {row["lr"] for row in rows.read(study.kept(BASE)) if row["mixer"] == mixer and not row["trial"]}
    (arm,) = replace(first.at(lr), mixers=(mixer,), seeds=(seed,)).arms()
    if not (path := arm.result(folder).with_name("model.safetensors")).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(train(arm, arm.result(folder), lambda step, scores: None).state_dict(), path)
    return load_file(path)


if __name__ == "__main__":
    typer.run(run)
