"""Does competition pay when it is added late? RetNet is trained on recall without gates, then gates of 1 are added.

    python -m research.retrofit           rows into results/studies/retrofit.csv; continues what is in runs/retrofit
    python -m research.study show retrofit

The first half of training is the arm without gates of the study capacity-retnet, the second has as many steps of other
rows and a learning rate that is searched for every arm on seeds that are not reported.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from safetensors.torch import load_file, save_file

from headrace.comparison import rows, tuning
from headrace.comparison.arm import train
from headrace.comparison.plan import Arm, Plan, Question, Study
from headrace.comparison.run import collect, trained
from headrace.files import engine
from headrace.files.engine import Row
from headrace.files.processes import locked
from headrace.files.workers import Worker, place_workers

from . import study

BASE, ARMS = "capacity-retnet", ("none", "wide sigmoid", "softmax")
LATER = 1000  # added to a seed for the second half, which has other rows
FOLDER, RESULTS = Path("runs", "retrofit"), study.kept("retrofit")
PAIRS = (("softmax", "none"), ("softmax", "wide sigmoid"), ("wide sigmoid", "none"))


def run(folder: Path = FOLDER, workers: int | None = None) -> None:
    (first,) = study.plan(BASE).plans
    later = Study("retrofit", "Gates that are added halfway", (second(first),))
    (plan,) = later.plans
    places = place_workers(["cpu"], workers)
    with locked(folder), engine.claimed(folder, later.claim()):
        halves = [half(first, of.part, seed - LATER) for of in (*plan.trials()[:1], plan) for seed in of.seed_numbers]
        trained(halves, folder, tell, places, partial(half_trained, folder=folder))
        measure = partial(continued, first=first, folder=folder)
        trials = trained([arm for one in later.trials() for arm in one.arms()], folder, tell, places, measure)
        arms = trained(plan.arms(tuning.best(plan, trials)), folder, tell, places, measure)
    rows.write(rows.rows(collect(later, arms, trials)), RESULTS)


def tell(arm: Arm, step: int, scores: dict[str, float] | None) -> None:
    if step == arm.plan.recipe.steps:
        print(f"{arm.plan.name}: {arm.mixer}, seed {arm.seed}", flush=True)


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


def half(first: Plan, part: Any, seed: int) -> Arm:
    """The first half of training, with the learning rate that the study took."""
    mixer = question().names[0][0]
    (lr,) = {row["lr"] for row in rows.read(study.kept(BASE)) if row["mixer"] == mixer and not row["trial"]}
    (arm,) = replace(first.at(lr), part=part, mixers=(mixer,), seeds=(seed,)).arms()
    return arm


def weights_of(arm: Arm, folder: Path) -> Path:
    return (folder / arm.result).with_name("model.safetensors")


def half_trained(arm: Arm, worker: Worker, folder: Path) -> Row:
    """The result of a first half, whose weights are saved."""
    model, result = train(arm, lambda *news: worker.report(news))
    weights_of(arm, folder).parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), weights_of(arm, folder))
    return result


def continued(arm: Arm, worker: Worker, first: Plan, folder: Path) -> Row:
    """The result of an arm of the second half."""
    weights = load_file(weights_of(half(first, arm.plan.part, arm.seed - LATER), folder))
    return train(arm, lambda *news: worker.report(news), weights=weights)[1]


if __name__ == "__main__":
    typer.run(run)
