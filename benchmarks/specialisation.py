"""Do heads specialise? The reported models of the study `clusters`, trained again, and which head serves which cluster.

    python benchmarks/specialisation.py run       into results/specialisation.csv; the same command continues
    python benchmarks/specialisation.py show      the table, as Markdown

All columns are mutual informations between a head and a cluster of keys, over the largest that is possible: 0 if every
cluster is served by all heads alike, 1 if each has heads of its own.

    write, read   from the gates' shares, at positions that store a key and at queries
    ablation      from the recall that a cluster loses when a head's output is set to zero
    chance        the same as ablation, with the clusters of the queries permuted
"""

import csv
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
import typer
from torch import Tensor, nn

import study
from headrace.layers.linear.competition import HeadCompetition
from headrace.studies.compare.arm import train
from headrace.studies.compare.plan import Arm
from headrace.tasks import IGNORED, Pair
from headrace.tasks.base import Batch
from record import append, environment

NAME, ROWS, PAIRS = "clusters", 512, 16
RESULTS = Path(__file__).parent / "results" / "specialisation.csv"
MEASURES = ("write", "read", "ablation", "chance")
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass
class Found:
    mixer: str
    seed: int
    lr: float
    recall: float
    write: float | None  # None without such a gate
    read: float | None
    ablation: float
    chance: float
    seconds: float


@app.command()
def run(seconds: float = math.inf) -> None:
    """Trains and measures what is not in the file yet, until the time is over."""
    until, done = time.monotonic() + seconds, {(row["mixer"], int(row["seed"])) for row in kept()}
    for arm in arms():
        if (arm.mixer, arm.seed) not in done and time.monotonic() < until:
            append(RESULTS, environment("cpu"), [measured(arm)])
            print(f"{arm.mixer}, seed {arm.seed}", flush=True)


@app.command()
def show() -> None:
    print(*lines(), sep="\n")


def lines() -> list[str]:
    """A table with the mean and standard deviation of each measure over seeds."""
    question, _ = study.read(NAME)
    shown = [
        "| mixer | seeds | write gate | read gate | ablation | by chance |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mixer, name in question.names:
        own = [row for row in kept() if row["mixer"] == mixer]
        cells = [summed([float(row[measure]) for row in own if row[measure]]) for measure in MEASURES]
        shown.append(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    return shown


def summed(values: list[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else "–"


def kept() -> list[dict[str, str]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def arms() -> list[Arm]:
    """The reported arms of the study, with the learning rates that its search took."""
    _, found = study.read(NAME)
    (plan,) = study.plan(NAME).plans
    return plan.arms({row["mixer"]: row["lr"] for row in found if not row["trial"]})


def measured(arm: Arm) -> Found:
    torch.set_num_threads(1)
    started, task = time.monotonic(), arm.plan.task
    with TemporaryDirectory() as folder:
        model = train(arm, Path(folder) / "result.json", lambda step, scores: None).eval()
    assert isinstance(task, Pair) and task.clusters is not None
    batch = replace(task, pairs=PAIRS, least=None).held_out(ROWS)
    asked, clusters = batch["shift_labels"] != IGNORED, batch["input_ids"][..., 0]
    whole, gates = recalled(model, batch)
    silenced = 1 - torch.eye(arm.plan.shape.heads)
    lost = torch.stack([whole - recalled(model, batch, keep)[0] for keep in silenced])  # [H, queries]
    of = clusters[asked]
    chance = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(0))]
    return Found(
        arm.mixer, arm.seed, arm.plan.recipe.lr, whole.mean().item(),
        information(by_cluster(gates["write"][~asked].T, clusters[~asked])) if "write" in gates else None,
        information(by_cluster(gates["read"][asked].T, of)) if "read" in gates else None,
        information(by_cluster(lost, of).clamp_min(0)), information(by_cluster(lost, chance).clamp_min(0)),
        round(time.monotonic() - started, 1),
    )  # fmt: skip


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
    apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    return float(torch.xlogy(joint, joint / apart.clamp_min(1e-300)).sum()) / math.log(min(weights.shape))


if __name__ == "__main__":
    app()
