"""Do heads specialize? The reported models of studies of clusters, trained again, and which head serves which cluster.

    python -m research.specialization run STUDY      into results/specialization/STUDY.csv; the same command continues
    python -m research.specialization show           the table, as Markdown

All columns are mutual informations between a head and a cluster of keys, over the largest that is possible: 0 if every
cluster is served by all heads alike, 1 if each has heads of its own.

    write, read   from the gates' shares, at positions that store a key and at queries
    ablation      from the recall that a cluster loses when a head's output is set to zero
    chance        the same as ablation, with the clusters of the queries permuted
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.record import markdown, read, write
from headrace.comparison.arm import train
from headrace.comparison.plan import Arm
from headrace.files import engine
from headrace.files.engine import Point, Row
from headrace.files.processes import locked
from headrace.files.workers import Worker, place_workers
from headrace.layers.linear.competition import HeadCompetition
from headrace.tasks import IGNORED, Pair
from headrace.tasks.base import Batch

from . import RESULTS, study

STUDIES, ROWS, PAIRS = ("clusters", "clusters-width"), 512, 16
MEASURES = ("write", "read", "ablation", "chance")
app = typer.Typer(add_completion=False, help=__doc__)


def kept(name: str) -> Path:
    return RESULTS / "specialization" / f"{name}.csv"


@app.command()
def run(name: str, folder: Path | None = None, workers: int | None = None) -> None:
    """Trains and measures every reported arm of a study."""
    points = [Point(f"{arm.mixer}, seed {arm.seed}", Path("arms", f"{arm.slug}.json"), arm) for arm in arms(name)]
    folder = folder or Path("runs", f"specialization-{name}")
    with locked(folder):
        claim, progress = study.plan(name).claim(), engine.lines(print, points)
        rows = engine.run(folder, claim, points, measured, progress, place_workers(["cpu"], workers))
    write(kept(name), rows)


@app.command()
def show() -> None:
    print(*lines(), sep="\n")


def lines() -> list[str]:
    """A table with the mean and standard deviation of each measure over seeds, by width and mixer."""
    shown = []
    for name in STUDIES:
        names, rows = study.question(name).names, read(kept(name))
        for width, (mixer, arm) in product(sorted({int(row["hidden_size"]) for row in rows}), names):
            own = [row for row in rows if row["mixer"] == mixer and int(row["hidden_size"]) == width]
            means = [summed([float(row[measure]) for row in own if row[measure]]) for measure in MEASURES]
            shown.append([str(width), arm, str(len(own)), *means])
    shown.sort(key=lambda row: int(row[0]))
    return markdown(["width", "mixer", "seeds", "write gate", "read gate", "ablation", "by chance"], shown)


def summed(values: list[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else "–"


def arms(name: str) -> list[Arm]:
    """The reported arms of a study, with the learning rates that its search took."""
    _, runs = study.read(name)
    return [
        arm
        for plan in study.plan(name).plans
        for arm in plan.arms(
            {row["mixer"]: row["lr"] for row in runs if not row["trial"] and row["comparison"] == plan.name}
        )
    ]


def measured(arm: Arm, worker: Worker) -> Row:
    """The informations of an arm; `write` and `read` are None without such a gate."""
    started, task = time.monotonic(), arm.plan.task
    model, _ = train(arm, lambda *news: None)
    model.eval()
    assert isinstance(task, Pair) and task.clusters is not None
    batch = replace(task, pairs=PAIRS, least=None).held_out(ROWS)
    queries, clusters = batch["shift_labels"] != IGNORED, batch["input_ids"][..., 0]
    whole, gates = recalled(model, batch)
    silenced = 1 - torch.eye(arm.plan.shape.heads)
    lost = torch.stack([whole - recalled(model, batch, keep)[0] for keep in silenced])  # [H, queries]
    of = clusters[queries]
    chance = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(0))]
    writing, reading = gates.get("write"), gates.get("read")
    return {
        "mixer": arm.mixer, "hidden_size": arm.plan.shape.hidden_size, "seed": arm.seed, "lr": arm.plan.recipe.lr,
        "recall": whole.mean().item(),
        "write": None if writing is None else information(by_cluster(writing[~queries].T, clusters[~queries])),
        "read": None if reading is None else information(by_cluster(reading[queries].T, of)),
        "ablation": information(by_cluster(lost, of).clamp_min(0)),
        "chance": information(by_cluster(lost, chance).clamp_min(0)), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


@torch.no_grad()
def recalled(model: Any, batch: Batch, keep: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """(1 for each query that is answered, else 0; the shares [rows, T, H] by kind of gate), with the heads' outputs
    multiplied by `keep` [H]."""
    labels, gates = batch["shift_labels"], dict[str, Tensor]()
    with hooked(model, gates, keep):
        right = model(**batch).logits.argmax(-1) == labels
    return right[labels != IGNORED].float(), gates


@contextmanager
def hooked(model: nn.Module, gates: dict[str, Tensor], keep: Tensor | None) -> Iterator[None]:
    def scale(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        return args[0] if keep is None else (args[0].unflatten(-1, (len(keep), -1)) * keep[:, None]).flatten(-2)

    handles = [module.register_forward_pre_hook(scale) for name, module in model.named_modules() if "o_proj" in name]
    assert handles, "a mixer without an output projection by this name"
    for name, module in model.named_modules():
        if isinstance(module, HeadCompetition):
            kind = "write" if "write" in name else "read"
            note = lambda module, args, out, kind=kind: gates.update({kind: out.softmax(-1)})  # noqa: E731
            handles.append(module.register_forward_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def by_cluster(values: Tensor, clusters: Tensor) -> Tensor:
    """The mean [H, clusters] of values [H, n] at positions of each cluster."""
    return torch.stack([values[:, clusters == c].mean(1) for c in clusters.unique()], 1)


def information(weights: Tensor) -> float:
    """The mutual information of row and column, if they are drawn with probabilities proportional to weights ≥ 0, over
    its largest possible value; 0 for weights that are all 0."""
    if not weights.any():
        return 0.0
    joint = weights.double() / weights.sum().double()
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    return float(torch.xlogy(joint, joint / independent.clamp_min(1e-300)).sum()) / math.log(min(weights.shape))


if __name__ == "__main__":
    app()
