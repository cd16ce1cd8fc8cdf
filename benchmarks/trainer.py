"""What `headrace train` adds to a step: the Trainer's time for one, over that of the same model, data and optimizer in
a bare loop.

    python benchmarks/trainer.py --data books          laptop-5m; rounds of both in turn, in one process

A step of the Trainer is counted from one step's beginning to the next one's: loading, logging and all its callbacks are
in it. Evaluation and checkpoints are not: neither happens within a round.
"""

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from headrace.data import Collator, open_data
from headrace.studies.report.numbers import spread
from headrace.training import recipes
from headrace.training.model import build
from headrace.training.optimizer import optimizer
from headrace.training.run import arguments, make_trainer
from headrace.training.watch import Watch
from program import Log, show
from record import RESULTS


class Clock(TrainerCallback):
    def __init__(self):
        self.begins = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begins.append(time.perf_counter())


def differences(moments: list[float]) -> float:
    """Seconds a step, without the first, which warms up."""
    return median(b - a for a, b in pairwise(moments[1:]))


def by_trainer(recipe, data, steps: int) -> float:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(recipe, Path(folder), "none")
        settings.max_steps, settings.save_strategy, settings.eval_strategy = steps + 2, "no", "no"
        settings.disable_tqdm, settings.logging_steps = False, 10
        trainer = make_trainer(recipe, data, settings)
        trainer.add_callback(Watch(trainer, recipe.warmup_steps))
        trainer.add_callback(clock)
        trainer.train()
    return differences(clock.begins)


def bare(recipe, data, steps: int) -> float:
    model = build(recipe).train()
    update = optimizer(model, recipe)
    loader = iter(DataLoader(data.train, recipe.micro_batch, shuffle=True, collate_fn=Collator(0), drop_last=True))
    parts = recipe.rows // recipe.micro_batch
    moments = []
    for _ in range(steps + 2):
        moments.append(time.perf_counter())
        for _ in range(parts):
            (model(**next(loader), skip_logits=True).loss / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        update.step()
        update.zero_grad()
    return differences(moments)


def main(
    data: Annotated[Path, typer.Option(help="What `headrace prepare --length 512` made.")],
    recipe: Annotated[str, typer.Option()] = "laptop-5m",
    mixer: Annotated[str, typer.Option()] = "softmax-gla",
    rounds: Annotated[int, typer.Option()] = 5,
    steps: Annotated[int, typer.Option()] = 8,
    threads: Annotated[int, typer.Option()] = 1,
) -> None:
    torch.set_num_threads(threads)
    chosen, _ = recipes.load(recipe, {"mixer": mixer})
    rows = open_data(data)
    times = [(bare(chosen, rows, steps), by_trainer(chosen, rows, steps)) for _ in range(rounds)]
    ratios = [ours / floor for floor, ours in times]
    log = Log(RESULTS / "trainer.csv")
    row = {
        "recipe": recipe, "mixer": mixer, "rounds": rounds, "steps": steps, "bare": median(floor for floor, _ in times),
        "trainer": median(ours for _, ours in times), "overhead": median(ratios) - 1, "spread": spread(ratios) or 0.0,
    }  # fmt: skip
    log.add([row])
    lines = [
        ["bare loop", f"{row['bare']:.3f}"], ["Trainer", f"{row['trainer']:.3f}"],
        ["overhead", f"{100 * row['overhead']:.1f} % (spread {100 * row['spread']:.1f})"],
    ]  # fmt: skip
    title = f"{recipe}, {mixer}, {threads} threads, {rounds} rounds of {steps} steps"
    show(title, ["", "seconds a step"], lines)
    log.end()


if __name__ == "__main__":
    typer.run(main)
