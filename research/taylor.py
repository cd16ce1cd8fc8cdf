"""Softmax attention cut off after the n-th order, and taken apart: how far from softmax, and how well it learns.

    python -m research.taylor error                               relative errors by order and size of the logits
    python -m research.taylor curves book.txt.gz [more ...]       train and held-out loss on a text, in CPU minutes
    python -m research.taylor show                                the last losses of the curves, as Markdown
    python -m research.taylor draw                                the curves that are kept, without new runs

The first two write a CSV file beside the other results and draw figures for docs/ (figures 4 to 6 of arXiv 2507.23632).
`curves` is a comparison as `headrace compare` makes them: interrupted, the same command continues.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill
from typing import Annotated, Any

import matplotlib
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.record import Row, append, environment, markdown, read, write
from headrace.comparison.model import ArmRecipe, Shape
from headrace.comparison.plan import Plan, Study
from headrace.comparison.run import complete
from headrace.extra.taylor import truncated_exp
from headrace.files.devices import all_devices
from headrace.files.processes import locked
from headrace.files.workers import place_workers
from headrace.history.layers.softmax_rnn import numerator
from headrace.history.specs.softmax_rnn import SoftmaxRNNSpec
from headrace.report.page import PALETTE, STYLE
from headrace.tasks import Text

from . import RESULTS

DOCS = Path(__file__).parent / "docs"
ORDERS, LOGITS = range(11), (0.25, 0.5, 1.0, 2.0, 4.0)
NORM, RELU = "softmax-rnn-norm", "softmax-rnn-norm(denominator=sum, numerator=relu{})"
ELU = "softmax-rnn-norm(denominator=sum, numerator=elu+1{})"
COSINE = "softmax-rnn-norm(denominator=input-length, numerator=cosine{})"
# Panel -> label -> expression. Softmax attention is in each.
PANELS: dict[str, dict[str, str]] = {
    "e^x by order, over an L2 norm": {
        **{f"order {n}": f"{NORM}(order={n})" for n in (1, 2, 4, 10)},
        "e^x": NORM,
    },
    "relu and elu + 1 over their sum, cosine over s^σ(c)": {
        "relu": RELU.format(""),
        **{f"relu, order {n}": RELU.format(f", order={n}") for n in (2, 10)},
        "elu + 1": ELU.format(""),
        **{f"elu + 1, order {n}": ELU.format(f", order={n}") for n in (2, 10)},
        "cosine": COSINE.format(""),
        **{f"cosine, order {n}": COSINE.format(f", order={n}") for n in (2, 10)},
    },
    "e^x by denominator": {
        "L2 norm": NORM,
        "gate and length": "softmax-rnn-gate",
        "length alone": "softmax-rnn-gate(gate=none)",
        "detached sum": f"{NORM}(denominator=detached)",
        "detached sum and length": f"{NORM}(denominator=detached, by_length=true)",
        "input gate and length": "softmax-rnn-gate(gate=input)",
    },
    "e^x by norm": {
        "L2 norm": NORM,
        "L2 norm and length": f"{NORM}(by_length=true)",
        "RMS norm": f"{NORM}(denominator=rms)",
        "layer norm": f"{NORM}(denominator=layer)",
    },
}
SOFTMAX = "transformer"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# --- errors ----------------------------------------------------------------------------------------------------------


@app.command()
def error(tokens: int = 256, heads: int = 16, dim: int = 32, seed: int = 0) -> None:
    """Random q, k and v, causal, float64."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 1, tokens, heads, dim, dtype=torch.float64)
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    rows = [distance(q * size, k, v, allowed, order, size) for size in LOGITS for order in ORDERS]
    append(RESULTS / "taylor_error.csv", {"tokens": tokens, "dim": dim} | environment(), rows)
    draw_errors(rows).savefig(DOCS / "taylor-error.png")
    lines = [[f"{x['order']}", f"{x['logits']:g}", f"{x['by_sum']:.2e}", f"{x['by_norm']:.2e}"] for x in rows]
    print(*markdown(["order", "logits' std", "over its sum", "over its L2 norm"], lines), sep="\n")


def distance(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, order: int, size: float) -> Row:
    """Mean squared distance from softmax attention over its mean square, as a root. logits: their standard
    deviation. by_norm: both divided by their L2 norm."""
    softmax, _ = numerator(q, k, SoftmaxRNNSpec(), allowed)
    exact = softmax @ v.transpose(1, 2)
    logits = torch.einsum("bthd,blhd->bhtl", q, k) / q.shape[-1] ** 0.5
    weights = truncated_exp(logits, order) * allowed
    out = weights @ v.transpose(1, 2)
    by_sum = relative(out / weights.sum(-1, keepdim=True), exact / softmax.sum(-1, keepdim=True))
    return {"order": order, "logits": size, "by_sum": by_sum, "by_norm": relative(unit(out), unit(exact))}


def relative(x: Tensor, y: Tensor) -> float:
    return ((x - y).norm() / y.norm()).item()


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def draw_errors(rows: list[Row]) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        titles = {"by_sum": "over its sum", "by_norm": "over its L2 norm"}
        for ax, name in zip(figure.subplots(1, 2, sharey=True), titles, strict=True):
            for colour, size in zip(PALETTE, LOGITS, strict=False):
                points = [(row["order"], row[name]) for row in rows if row["logits"] == size]
                ax.semilogy(*zip(*points, strict=True), "o-", color=colour, ms=4, label=f"{size:g}")
            ax.set(title=titles[name], xlabel="order", ylim=(1e-9, 1e2), xticks=list(ORDERS))
        figure.axes[0].set_ylabel("error relative to softmax attention")
        figure.axes[1].legend(title="logits' std")
    return figure


# --- curves ----------------------------------------------------------------------------------------------------------


@app.command()
def curves(
    texts: Annotated[list[str], typer.Argument(help="Text files, .gz or not.")],
    steps: int = 240,
    output: Annotated[Path, typer.Option(help="The folder of the runs.")] = Path("runs/taylor"),
    seeds: int = 1,
) -> None:
    """A language model of bytes for every mixer and seed."""
    study = plan(tuple(texts), steps, seeds)
    with locked(output):
        results = complete(study, output, listen, place_workers(all_devices(None), None))
    points = list(collect(results))
    write(RESULTS / "taylor_curves.csv", points)
    draw()


@app.command()
def draw() -> None:
    """Draws the curves that are kept, each over the denominator that it was trained with."""
    kept = [row | {"step": int(row["step"])} for row in read(RESULTS / "taylor_curves.csv")]
    draw_curves(kept).savefig(DOCS / "taylor-curves.png", dpi=72, pil_kwargs={"optimize": True})


@app.command()
def show() -> None:
    """The last held-out losses of the curves that are kept, as Markdown."""
    print(*lines(), sep="\n")


def lines() -> list[str]:
    rows, shown = read(RESULTS / "taylor_curves.csv"), []
    last = max(int(row["step"]) for row in rows)
    for label in dict.fromkeys(row["label"] for row in rows):
        by_seed = {row["seed"]: row for row in rows if row["label"] == label and int(row["step"]) == last}
        losses = [float(row["held_out_loss"]) for row in by_seed.values()]
        spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
        shown.append([label, f"{fmean(losses):.3f}{spread}"])
    return markdown(["", "held-out loss (nats/byte)"], shown)


def plan(texts: tuple[str, ...], steps: int, seeds: int) -> Study:
    mixers = dict.fromkeys([SOFTMAX, *(m for panel in PANELS.values() for m in panel.values())])
    recipe = ArmRecipe(steps=steps, batch_size=16, lr=4e-3, evaluations=12, held_out=48)
    shape = Shape(hidden_size=64, layers=2, heads=4, mlp=176)
    return Study("taylor", "Softmax attention taken apart", (
        Plan("taylor", tuple(mixers), Text(texts, length=128), shape, recipe, seeds),
    ))  # fmt: skip


def listen(arm: Any, step: int, scores: dict[str, float] | None) -> None:
    if scores:
        print(f"{arm.mixer}, seed {arm.seed}, step {step}: {scores['loss']:.3f}", flush=True)


def collect(results: dict[str, Any]) -> Iterator[Row]:
    """The points of every panel's curves, and the environment in which each arm ran."""
    for panel, members in PANELS.items():
        for label, mixer in {"softmax attention": SOFTMAX, **members}.items():
            for arm in (a for a in results["arms"] if a["mixer"] == mixer):
                for point in (p for p in arm["curve"] if p["scores"]):
                    losses = {"train_loss": point["train_loss"], "held_out_loss": point["scores"]["loss"]}
                    where = {"panel": panel, "label": label, "mixer": mixer, "seed": arm["seed"]}
                    yield {
                        "environment": results["environments"][arm["environment"]],
                        **where,
                        "step": point["step"],
                        **losses,
                    }


def draw_curves(points: list[Row]) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 6.4), layout="constrained")
        panels = list(dict.fromkeys(point["panel"] for point in points))
        axes = figure.subplots(2, len(panels), sharex=True, sharey=True)
        for column, panel in enumerate(panels):
            own = [p for p in points if p["panel"] == panel and p["step"]]
            for row, loss in enumerate(("train_loss", "held_out_loss")):
                ax = axes[row, column]
                for i, label in enumerate(dict.fromkeys(p["label"] for p in own)):
                    steps = sorted({p["step"] for p in own})
                    line = [
                        (step, fmean(float(p[loss]) for p in own if (p["label"], p["step"]) == (label, step)))
                        for step in steps
                    ]
                    ax.plot(*zip(*line, strict=True), color="black" if i == 0 else PALETTE[i - 1], lw=1.5, label=label)
                ax.set(title=fill(panel, 32) if row == 0 else "", xlabel="step" if row else "", ylim=(None, 3.2))
            axes[0, column].legend(fontsize=7, loc="upper right", ncols=2 if len(axes[0, column].lines) > 8 else 1)
        axes[0, 0].set_ylabel("train loss (nats/byte)")
        axes[1, 0].set_ylabel("held-out loss (nats/byte)")
    return figure


if __name__ == "__main__":
    app()
