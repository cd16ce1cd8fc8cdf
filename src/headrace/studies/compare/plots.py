"""The pictures of a comparison. Each plot function returns a matplotlib Figure, or None if there is nothing to draw."""

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from ...report.numbers import compact, quartiles
from ...report.style import PALETTE, SOFT, STYLE
from . import panels
from .summary import Comparison, Contender

WIDE = 4  # ratio of the largest value to the smallest above which an axis is logarithmic
LABELLED = 8  # largest number of curves with a legend inside the plot


def draw(comparison: Comparison) -> dict[str, tuple[str, Figure]]:
    """Name -> (caption, figure), in the order of the report."""
    with matplotlib.rc_context(STYLE):
        drawn = {name: (caption, plot(comparison)) for name, (caption, plot) in PLOTS.items()}
    return {name: (caption, figure) for name, (caption, figure) in drawn.items() if figure is not None}


def colours(comparison: Comparison) -> dict[str, str]:
    """Mixer -> colour, the same in every picture and table of a study."""
    if comparison.many:
        return {c.mixer: panels.colour(c) for c in comparison.contenders}
    return {mixer: PALETTE[number % len(PALETTE)] for mixer, number in comparison.numbers.items()}


def axes(comparison: Comparison, width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def legend(figure: Figure, ax: Axes, entries: int) -> None:
    if entries <= LABELLED:
        ax.legend()
    else:
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)


def spread(ax: Axes, places: dict[Any, float]) -> None:
    """Sets the ticks of the x axis, `places` from label to position; the axis is logarithmic for a wide range."""
    values = list(places.values())
    if min(values) > 0 and max(values) > WIDE * min(values):
        ax.set_xscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(values, [str(name) for name in places])


def mean_and_range(ax: Axes, line: str, label: str, colour: str, x: Any, mean: Any, low: Any, high: Any) -> None:
    """Plots a line through the means, in a shaded band from the lowest to the highest values."""
    ax.plot(x, mean, line, label=label, lw=2, color=colour)
    ax.fill_between(x, low, high, color=colour, alpha=0.13, lw=0)


def learning_curves(comparison: Comparison) -> Figure | None:
    if comparison.many:
        return panels.curves(comparison)
    figure, ax = axes(comparison, 5.2, 3.6)
    colour, metric = colours(comparison), comparison.metric
    for contender in comparison.contenders:
        if points := contender.curve():
            step, *scores = (np.array(column) for column in zip(*points, strict=True))
            mean_and_range(ax, "-", contender.label, colour[contender.mixer], step, *(metric.scale * x for x in scores))
    ax.set(xlabel="step", ylabel=f"held-out {metric.name} ({metric.unit})")
    if not metric.higher_is_better:
        zoom_past_start(ax, comparison)
    legend(figure, ax, len(comparison.contenders))
    return figure


def zoom_past_start(ax: Axes, comparison: Comparison) -> None:
    """Leaves the loss before training out of the y range, as it would flatten the rest of the curve."""
    later = [point for c in comparison.contenders for point in c.curve()[1:]]
    if later:
        low, high = min(p[2] for p in later), max(p[3] for p in later)
        margin = 0.05 * (high - low) + 1e-9
        ax.set_ylim((low - margin) * comparison.metric.scale, (high + margin) * comparison.metric.scale)


def final_scores(comparison: Comparison) -> Figure | None:
    ranked = comparison.finished[::-1]
    if not ranked:
        return None
    figure, ax = axes(comparison, 4.6, 1.0 + 0.42 * len(ranked))
    colour, scale = colours(comparison), comparison.metric.scale
    for y, c in enumerate(ranked):
        scores = np.array(list(c.by_seed.values())) * scale
        ax.errorbar(c.mean * scale, y, xerr=c.spread * scale, fmt="D", color=colour[c.mixer], ms=7, capsize=4, lw=2)
        ax.plot(scores, np.full(len(scores), y), "o", color=colour[c.mixer], alpha=0.4, ms=6, mec="none")
    ax.set_yticks(range(len(ranked)), [c.label for c in ranked])
    ax.set(xlabel=f"held-out {comparison.metric.name} ({comparison.metric.unit})", ylim=(-0.6, len(ranked) - 0.4))
    return figure


def by_length(comparison: Comparison) -> Figure | None:
    contenders = [c for c in comparison.contenders if c.by_length]
    if not contenders:
        return None
    figure, ax = axes(comparison, 5.2, 3.6)
    colour, metric = colours(comparison), comparison.metric
    for c in contenders:
        scores = np.array(list(c.by_length.values())).T * metric.scale  # [seeds, lengths]
        lengths, ends = list(c.by_length), (scores.min(0), scores.max(0))
        mean_and_range(ax, "o-", c.label, colour[c.mixer], lengths, scores.mean(0), *ends)
    ax.axvline(comparison.plan["length"], color=SOFT, ls=":")
    spread(ax, {n: n for n in contenders[0].by_length})
    ax.set(
        xlabel="length of row or source (dotted: longest in training)",
        ylabel=f"{metric.name} ({metric.unit})",
    )
    legend(figure, ax, len(contenders))
    return figure


def alignments(comparison: Comparison) -> Figure | None:
    aligned = [(c.label, c.alignment) for c in comparison.contenders if c.alignment]
    if not aligned:
        return None
    width, height = (0.9 + 0.26 * max(len(a[side]) for _, a in aligned) for side in ("source", "target"))
    figure = Figure(figsize=(width * len(aligned), height), layout="constrained")
    for ax, (label, found) in zip(figure.subplots(1, len(aligned), squeeze=False)[0], aligned, strict=True):
        ax.imshow(found["weights"], cmap="YlGnBu", vmin=0, vmax=1)
        ax.set_xticks(range(len(found["source"])), found["source"], fontsize=8)
        ax.set_yticks(range(len(found["target"])), found["target"], fontsize=8)
        ax.set_title(label, fontsize=10)
        ax.grid(False)
    return figure


def gate_entropy(comparison: Comparison) -> Figure | None:
    lines = [(c, gate, c.entropy(gate)) for c in comparison.contenders for gate in ("write", "read")]
    lines = [line for line in lines if line[2]]
    if not lines or comparison.many:
        return panels.entropy(comparison) if lines else None
    figure, ax = axes(comparison, 5.2, 3.6)
    colour = colours(comparison)
    for contender, gate, points in lines:
        step, entropy = zip(*points, strict=True)
        style = "-" if gate == "write" else "--"
        ax.plot(step, entropy, style, color=colour[contender.mixer], lw=2, label=f"{contender.label}, {gate}")
    ax.set(xlabel="step", ylabel="gate entropy / log(heads)", ylim=(0, 1.03))
    legend(figure, ax, len(lines))
    return figure


def heads(comparison: Comparison) -> Figure | None:
    rows = [row for contender in comparison.contenders for row in head_rows(contender)]
    if not rows:
        return None
    H = max(len(load) for _, load in rows)
    table = np.full((len(rows), H), np.nan)
    for i, (_, load) in enumerate(rows):
        table[i, : len(load)] = load
    figure, ax = axes(comparison, 2.6 + 0.55 * H, 1.0 + 0.3 * len(rows))
    largest = max(np.nanmax(table), 2 / H)
    ax.imshow(table, cmap="YlGnBu", vmin=0, vmax=largest, aspect="auto")
    for (y, x), share in np.ndenumerate(table):
        if np.isfinite(share):
            dark = share > 0.6 * largest
            ax.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=8, color="white" if dark else "#333")
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_xticks(range(H), [str(h + 1) for h in range(H)])
    ax.set(xlabel="head")
    ax.grid(False)
    return figure


def head_rows(contender: Contender) -> list[tuple[str, list[float]]]:
    """(name, mean share of each head) of each gate of the first seed, separately for query and other positions if the
    task has both."""
    rows = []
    for gate in contender.gates:
        name = f"{contender.label}, layer {gate['layer'] + 1}, {gate['gate']}"
        if gate["load_asked"] and gate["load_other"]:
            rows += [(f"{name}, queries", gate["load_asked"]), (f"{name}, other", gate["load_other"])]
        else:
            rows.append((name, gate["load"]))
    return rows


def cost(comparison: Comparison) -> Figure | None:
    contenders = comparison.shown[::-1]
    columns: dict[str, Callable[[Contender], list[float]]] = {
        "parameters": lambda c: [c.constant("parameters")] * 3,
        "state (bytes per sequence)": lambda c: [c.constant("state_bytes")] * 3,
        "training tokens per second": lambda c: quartiles(c.speeds),
    }
    figure = Figure(figsize=(10, 0.9 + 0.34 * len(contenders)))
    grid = figure.subplots(1, len(columns), sharey=True)
    colour = [colours(comparison)[c.mixer] for c in contenders]
    for ax, (title, value) in zip(grid, columns.items(), strict=True):
        low, middle, high = np.array([value(c) for c in contenders]).T
        reach: Any = {"xerr": [middle - low, high - middle], "ecolor": SOFT} if (low < high).any() else {}
        bars = ax.barh(range(len(middle)), middle, color=colour, height=0.65, **reach)
        ax.bar_label(bars, [compact(v) for v in middle], padding=3, fontsize=8)
        ax.set(title=title, xlim=(0, 1.25 * high.max() or 1))  # all states may have 0 bytes
        ax.title.set_size(10)
        ax.grid(False)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: compact(v)))
        ax.locator_params(axis="x", nbins=4)
    grid[0].set_yticks(range(len(contenders)), [c.label for c in contenders])
    return figure


PLOTS: dict[str, tuple[str, Callable[[Comparison], Figure | None]]] = {
    "curves": ("Learning curves: the mean over seeds; shaded, the range from worst to best seed.", learning_curves),
    "scores": ("Final scores: the mean and standard deviation over seeds, and the score of each seed.", final_scores),
    "lengths": (
        "Score by length of row or source: the mean over seeds; shaded, the range from worst to best seed.",
        by_length,
    ),
    "alignments": (
        "Alignment weights of the first seed: characters of the target (rows, from top to bottom) by characters of the "
        "source (columns).",
        alignments,
    ),
    "entropy": (
        "Gate entropy divided by log(heads): 1 if all heads are used evenly, 0 if one head is used alone. Mean over "
        "held-out positions, layers and seeds; sigmoid gates are first divided by their sum.",
        gate_entropy,
    ),
    "heads": ("Mean share of each head in each write and read gate after training, first seed.", heads),
    "cost": (
        "Size and training speed. Speed is the median over the intervals between evaluations, with its quartiles, "
        "measured while models trained side by side on the machine below; headrace bench measures models in turn.",
        cost,
    ),
}
