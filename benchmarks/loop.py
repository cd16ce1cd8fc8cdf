"""What `headrace train` adds to a step: its time, over that of the same model, data and optimizer in a bare loop.

    python benchmarks/loop.py --data books          laptop-5m; rounds of both in turn, in one process

A step of the run is counted from one step's beginning to the next one's: loading and logging are in it. Evaluation and
the checkpoint are not: they follow the last step.
"""

import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated
from unittest.mock import patch

import torch
import typer
from torch import nn
from torch.utils.data import DataLoader

from headrace.data import Collator, open_data
from headrace.report.numbers import spread
from headrace.training import recipes
from headrace.training.loop import Batches
from headrace.training.model import build
from headrace.training.optimizer import optimizer
from headrace.training.processes import Processes
from headrace.training.run import make_loop
from headrace.training.watch import Stop
from program import Log, show
from record import RESULTS


def differences(moments: list[float]) -> float:
    """Seconds a step, without the first, which warms up."""
    return median(b - a for a, b in pairwise(moments[1:]))


def by_run(recipe, data, steps: int) -> float:
    moments, tokens = [], recipe.batch_tokens * (steps + 2)
    chosen = replace(recipe, tokens=tokens, evaluate_every=steps + 2, evaluate_rows=1, save_every=steps + 2)
    after = Batches.after

    def noted(self, step):
        for batches in after(self, step):
            moments.append(time.perf_counter())
            yield batches

    with tempfile.TemporaryDirectory() as folder, patch.object(Batches, "after", noted):
        make_loop(chosen, data, Path(folder), Processes(torch.device("cpu"))).run(Stop())
    return differences(moments)


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
    times = [(bare(chosen, rows, steps), by_run(chosen, rows, steps)) for _ in range(rounds)]
    ratios = [ours / floor for floor, ours in times]
    log = Log(RESULTS / "loop.csv")
    row = {
        "recipe": recipe, "mixer": mixer, "rounds": rounds, "steps": steps, "bare": median(floor for floor, _ in times),
        "run": median(ours for _, ours in times), "overhead": median(ratios) - 1, "spread": spread(ratios) or 0.0,
    }  # fmt: skip
    log.add([row])
    lines = [
        ["bare loop", f"{row['bare']:.3f}"], ["headrace train", f"{row['run']:.3f}"],
        ["overhead", f"{100 * row['overhead']:.1f} % (spread {100 * row['spread']:.1f})"],
    ]  # fmt: skip
    title = f"{recipe}, {mixer}, {threads} threads, {rounds} rounds of {steps} steps"
    show(title, ["", "seconds a step"], lines)
    log.end()


if __name__ == "__main__":
    typer.run(main)
