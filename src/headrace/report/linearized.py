"""The page of `headrace linearize`: what the new layers imitate, what the model lost, its state and speed, and the
commands that follow."""

from math import exp
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from .numbers import count, significant
from .page import PALETTE, SOFT, STYLE, Page, Section, picture

Report = dict[str, Any]  # what `training.linear.imitate` returns, with "decoding", "next" and what was asked for
ERRORS = (
    "‖new − old‖² / ‖old‖² of a layer's output on held-out rows, where both get the input of the old model: 0 is a "
    "perfect imitation, 1 is an output of 0."
)
REMOVED = (
    "How much the held-out loss rises when one layer gives 0, in nats per token: in the original, whose layer is "
    "attention, and in the new model. Where the second is near 0 and the first is not, the model goes round its linear "
    "layer (arXiv 2510.05901). Measured on at most 4 held-out rows."
)
WINDOWS = (
    "New layers with a sliding window have two parts, the window and the linear memory of older tokens; here one of "
    "them gives 0. Where the loss hardly rises without the memory, the layer is a sliding window; rows that are not "
    "longer than the window cannot tell. In the last row, the part is that of all new layers."
)
TASKS = (
    "Scores of `headrace eval` ± their standard errors over rows; its own report has what guessing reaches, and the "
    "differences on the same rows."
)
MODELS = {"original": "original", "new model": "linear"}
PARTS = MODELS | {"its window": "window", "its memory": "memory"}
CONTEXTS = (
    "State is what one sequence keeps between tokens, in float32. Speed is that of `generate`, of both models in turn, "
    "by the {clock} of {threads}: the median of a few tokens after a context that is not read where its content does "
    "not change the cost, so that keys and values are random numbers."
)
STAGES = {
    "original": "as it was read", "replaced": "with new layers, before they train", "transferred": "after they imitate"
}  # fmt: skip


def write_page(report: Report, folder: Path) -> Path:
    """Writes report.html and its pictures into the folder of a linearized model; `report` is its linearize.json."""
    nats, kept = report["nats"], ", ".join(map(str, report["kept"])) or "none"
    loss, more = nats["transferred"], nats["transferred"] - nats["original"]
    linear = count(sum(int(i) not in report["kept"] for i in report["layers"]), "attention layer")
    page = Page(
        "A model made linear",
        [f"{linear} of {report['from']} became {report['mixer']}; kept: {kept}."],
        [
            losses(nats | report.get("beside", {}), folder),
            *([tasks(report["tasks"], folder)] if "tasks" in report else []),
            imitation(report, folder),
            removal(report["removed"], folder),
            contexts(report, folder),
            Section("Next", listing="\n".join(f"# {what}\n{line}" for what, line in report["next"].items())),
        ],
        report["environments"],
        f"The held-out loss is {loss:.3f} nats per token, {more:+.3f} to the original, before the whole model trains.",
        "\n".join(report["commands"]),
    )
    return page.write(folder / "report.html")


def losses(nats: dict[str, float], folder: Path) -> Section:
    rows = [
        (name, STAGES.get(name, "trained further"), f"{value:.3f}", f"{exp(min(value, 700)):.4g}")
        for name, value in nats.items()
    ]
    names = ["\n".join(Path(name).parts[-2:]) for name in nats]  # the end of a folder
    drawn = bars({"on held-out rows": list(nats.values())}, names, "nats per token", "model")
    return Section(
        "Loss",
        header=("model", "", "nats per held-out token", "perplexity"),
        rows=rows,
        pictures=[picture("Loss on held-out rows.", drawn, folder / "losses.png")],
    )


def tasks(lines: list[dict[str, Any]], folder: Path) -> Section:
    """lines: those of the scores.csv of `headrace eval`."""
    models, found = [*dict.fromkeys(x["model"] for x in lines)], dict[tuple[str, str], dict[str, Any]]()
    for x in lines:
        found.setdefault((x["task"], x["metric"]), {})[x["model"]] = x
    shares = {name: own for name, own in found.items() if own[models[0]]["accuracy"]}
    heights = {model: [own[model]["score"] for own in shares.values()] for model in models}
    lacking = [f"{x['model']} on {x['task']} {x['metric']}" for x in lines if x["accuracy"] and x["score"] is None]
    drawn = bars(heights, ["\n".join(name) for name in shares], "accuracy", "task") if shares else None
    return Section(
        "Tasks",
        about=[TASKS],
        header=("task", "metric", "rows", *models),
        rows=[(*name, own[models[0]]["rows"], *(score(own[model]) for model in models)) for name, own in found.items()],
        sentences=[f"Not in the picture, as it is not finite: {one}." for one in lacking],
        pictures=[] if drawn is None else [picture("Accuracies.", drawn, folder / "tasks.png")],
    )


def score(line: dict[str, Any]) -> str:
    known = [x for x in (line["score"], line["standard_error"]) if x is not None]
    return " ± ".join(f"{x:.1%}" if line["accuracy"] else significant(x, 3) for x in known) or "not finite"


def imitation(report: Report, folder: Path) -> Section:
    layers = report["layers"]
    stays = {i: "keeps its attention" if int(i) in report["kept"] else "" for i in layers}
    drawn = bars({when: [x[when] for x in layers.values()] for when in ("before", "after")}, list(layers), "error")
    steps = curve(report["curve"])
    return Section(
        "Imitation, layer by layer",
        about=[ERRORS],
        header=("layer", "before", "after", ""),
        rows=[(i, f"{x['before']:.3f}", f"{x['after']:.3f}", stays[i]) for i, x in layers.items()],
        pictures=[
            picture("Errors before and after the imitation.", drawn, folder / "errors.png"),
            picture("The mean error of the new layers on the rows of each step.", steps, folder / "curve.png"),
        ],
    )


def removal(removed: dict[str, dict[str, float]], folder: Path) -> Section:
    layers, together = {i: x for i, x in removed.items() if i != "all"}, removed.get("all")
    names = {name: key for name, key in PARTS.items() if all(key in x for x in layers.values())}
    drawn = bars(
        {name: [x[key] for x in layers.values()] for name, key in names.items()}, list(layers), "nats per token"
    )
    rows = [(i, *(f"{x[key]:+.3f}" if key in x else "" for key in names.values())) for i, x in removed.items()]
    return Section(
        "Each layer removed",
        about=[REMOVED] if together is None else [REMOVED, WINDOWS],
        header=("layer", *names),
        rows=rows,
        pictures=[picture("The loss without one layer, less that with all.", drawn, folder / "removed.png")],
    )


def contexts(report: Report, folder: Path) -> Section:
    """State and speed by the tokens of context."""
    decoding, memory = report["decoding"], report["state_bytes"]
    columns = {
        "state, MB": {n: {name: size / 1e6 for name, size in x.items()} for n, x in memory.items()},
        "tokens/s": decoding["tokens_per_second"],
    }
    rows = [
        (f"{int(n):,}", *(f"{x[n][key]:,.1f}" if n in x else "–" for x in columns.values() for key in MODELS.values()))
        for n in memory
    ]
    drawn = {
        unit: bars(
            {name: [x[key] for x in found.values()] for name, key in MODELS.items()},
            [f"{int(n):,}" for n in found], unit, "tokens of context",
        )
        for unit, found in columns.items() if found
    }  # fmt: skip
    longest = decoding["max_position_embeddings"]
    longer = f"The config names at most {longest:,} tokens, on which neither depends."
    return Section(
        "State and speed",
        about=[CONTEXTS.format(clock=decoding["clock"], threads=count(decoding["threads"], "thread"))],
        header=("tokens of context", *(f"{name}: {unit}" for unit in columns for name in MODELS)),
        rows=rows,
        sentences=[
            *(f"Tokens of the {name} are computed by {decoding['engine'][key]}." for name, key in MODELS.items()),
            *(f"No speed after {int(n):,} tokens: {why}." for n, why in decoding["left_out"].items()),
            *([longer] if any(int(n) > longest for n in memory) else []),
        ],
        pictures=[
            picture(f"{unit} after so many tokens.", figure, folder / f"contexts-{i}.png")
            for i, (unit, figure) in enumerate(drawn.items())
        ],
    )


def curve(errors: list[float]) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6, 3), layout="constrained")
        ax = figure.add_subplot()
        ax.plot(range(1, len(errors) + 1), errors, color=PALETTE[0])
        ax.set(xlabel="step", ylabel="error", ylim=(0, None))
    return figure


def bars(values: dict[str, list[Any]], groups: list[str], unit: str, of: str = "layer") -> Figure:
    """A figure with a group of bars for each layer or context; a group has a bar for each name in `values`, and none
    for None."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(min(2 + len(groups), 8), 3), layout="constrained")
        ax, width = figure.add_subplot(), 0.8 / len(values)
        for i, (name, heights) in enumerate(values.items()):
            places = [x + width * (i - (len(values) - 1) / 2) for x in range(len(groups))]
            colour = (SOFT, *PALETTE)[i % (1 + len(PALETTE))]
            ax.bar(places, np.array(heights, float), width, label=name, color=colour)  # None becomes NaN
        ax.set_xticks(range(len(groups)), groups)
        ax.set(xlabel=of, ylabel=unit)
        ax.grid(axis="x", visible=False)
        figure.legend(loc="outside upper center", ncols=len(values))
    return figure
