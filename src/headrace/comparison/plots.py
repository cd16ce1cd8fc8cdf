"""The pictures of a comparison and of a sweep. A picture of a comparison is a function of it and of the contenders that
have what is drawn; the function's docstring is the caption.

Pictures over steps of a comparison with more mixers than colours have a panel for each backbone.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from ..report.numbers import compact
from ..report.page import PALETTE, SOFT, STYLE
from .summary import Comparison, Contender, Sweep

WIDE = 4  # ratio of the largest value to the smallest above which an axis is logarithmic
APART = 1.03  # factor on the x axis between mixers with states of equal size, so that they do not overlap
LABELLED = 8  # largest number of curves with a legend above the plot; more have it to the right
COLUMNS = 5  # of panels

Parts = Sequence[tuple[Axes, list[Contender]]]


def draw(comparison: Comparison) -> dict[str, tuple[str, Figure]]:
    """Name -> (caption, figure), in the order of the report, of those for which there is something to draw."""
    drawn = {}
    with matplotlib.rc_context(STYLE):
        for name, (plot, known) in PLOTS.items():
            if shown := [c for c in comparison.contenders if known(c)]:
                drawn[name] = " ".join((plot.__doc__ or "").split()), plot(comparison, shown)
    return drawn


def colours(comparison: Comparison) -> dict[str, str]:
    """Mixer -> colour, the same in every picture and table of a study. Of many mixers, those with gates share one, and
    those without another."""
    if comparison.many:
        return {c.mixer: PALETTE[c.gated] for c in comparison.contenders}
    return {mixer: PALETTE[number % len(PALETTE)] for mixer, number in comparison.numbers.items()}


def axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def legend(ax: Axes, entries: int) -> None:
    if entries <= LABELLED:  # names of mixers are long: inside the plot they cover curves
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1))
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


def panels(comparison: Comparison, shown: list[Contender]) -> tuple[Figure, Parts]:
    """A figure, and its axes with their contenders: one with all `shown` or, of many, one for each backbone."""
    if not comparison.many:
        figure, ax = axes(5.2, 3.6)
        return figure, [(ax, shown)]
    families = [(name, own) for name, members in comparison.families() if (own := [c for c in members if c in shown])]
    rows = -(-len(families) // COLUMNS)
    figure = Figure(figsize=(2.1 * COLUMNS, 0.7 + 1.55 * rows), layout="constrained")
    grid = list(figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    for ax, (name, _) in zip(grid, families, strict=False):
        ax.set_title(name, fontsize=8, loc="left")
        ax.tick_params(labelsize=7)
    for ax in grid[len(families) :]:
        ax.set_axis_off()
    return figure, [(ax, members) for ax, (_, members) in zip(grid, families, strict=False)]


def over_steps(figure: Figure, parts: Parts, ylabel: str) -> Figure:
    """Labels the axes and the lines of `panels`."""
    ax = parts[0][0]
    if len(figure.axes) == 1:
        ax.set(xlabel="step", ylabel=ylabel)
        legend(ax, len(ax.lines))
        return figure
    lines = [Line2D([], [], color=colour) for colour in PALETTE[:2]]
    figure.legend(lines, ["backbone", "with competition"], loc="outside upper right", ncols=2, fontsize=8)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    return figure


def learning_curves(comparison: Comparison, shown: list[Contender]) -> Figure:
    """Learning curves: the mean over seeds; shaded, the range from worst to best seed."""
    figure, parts = panels(comparison, shown)
    colour, metric = colours(comparison), comparison.metric
    for ax, members in parts:
        for c in members:
            step, *scores = (np.array(column) for column in zip(*c.curve(), strict=True))
            mean_and_range(ax, "-", c.named, colour[c.mixer], step, *(metric.scale * x for x in scores))
    if not metric.higher_is_better:
        zoom_past_start(parts[0][0], shown)
    return over_steps(figure, parts, metric.axis)


def zoom_past_start(ax: Axes, contenders: list[Contender]) -> None:
    """Leaves the loss before training out of the y range, as it would flatten the rest of the curve."""
    later = [point for c in contenders for point in c.curve()[1:]]
    if later:
        low, high, scale = min(p[2] for p in later), max(p[3] for p in later), contenders[0].metric.scale
        margin = 0.05 * (high - low) + 1e-9
        ax.set_ylim((low - margin) * scale, (high + margin) * scale)


def final_scores(comparison: Comparison, shown: list[Contender]) -> Figure:
    """Final scores: the mean and standard deviation over seeds, and the score of each seed."""
    ranked = comparison.finished[::-1]
    figure, ax = axes(4.6, 1.0 + 0.42 * len(ranked))
    colour, scale = colours(comparison), comparison.metric.scale
    for y, c in enumerate(ranked):
        scores = np.array(list(c.by_seed.values())) * scale
        ax.errorbar(c.mean * scale, y, xerr=c.spread * scale, fmt="D", color=colour[c.mixer], ms=7, capsize=4, lw=2)
        ax.plot(scores, np.full(len(scores), y), "o", color=colour[c.mixer], alpha=0.4, ms=6, mec="none")
    ax.set_yticks(range(len(ranked)), [c.named for c in ranked])
    ax.set(xlabel=comparison.metric.axis, ylim=(-0.6, len(ranked) - 0.4))
    return figure


def by_length(comparison: Comparison, shown: list[Contender]) -> Figure:
    """Score by length of row or source: the mean over seeds; shaded, the range from worst to best seed."""
    figure, ax = axes(5.2, 3.6)
    colour, metric = colours(comparison), comparison.metric
    for c in shown:
        scores = np.ma.masked_invalid(list(c.by_length.values())).T * metric.scale  # [seeds, lengths]
        lengths, ends = list(c.by_length), (scores.min(0), scores.max(0))
        mean_and_range(ax, "o-", c.named, colour[c.mixer], lengths, scores.mean(0), *ends)
    ax.axvline(comparison.plan["length"], color=SOFT, ls=":")
    spread(ax, {n: n for n in shown[0].by_length})
    ax.set(xlabel="tokens in a row or source (dotted: most in training)", ylabel=metric.axis)
    legend(ax, len(shown))
    return figure


def alignments(comparison: Comparison, shown: list[Contender]) -> Figure:
    """Alignment weights of the first seed: characters of the target (rows, from top to bottom) by characters of the
    source (columns)."""
    aligned = [(c.label, c.alignment) for c in shown if c.alignment]
    width, height = (0.9 + 0.26 * max(len(a[side]) for _, a in aligned) for side in ("source", "target"))
    figure = Figure(figsize=(width * len(aligned), height), layout="constrained")
    for ax, (label, alignment) in zip(figure.subplots(1, len(aligned), squeeze=False)[0], aligned, strict=True):
        ax.imshow(alignment["weights"], cmap="YlGnBu", vmin=0, vmax=1)
        ax.set_xticks(range(len(alignment["source"])), alignment["source"], fontsize=8)
        ax.set_yticks(range(len(alignment["target"])), alignment["target"], fontsize=8)
        ax.set_title(label, fontsize=10)
        ax.grid(False)
    return figure


def gate_entropy(comparison: Comparison, shown: list[Contender]) -> Figure:
    """Gate entropy divided by log(heads), of write gates (solid) and read gates (dashed): 1 if all heads are used
    evenly, 0 if one head is used alone. Mean over held-out positions, layers and seeds; sigmoid gates are first divided
    by their sum."""
    figure, parts = panels(comparison, shown)
    colour = colours(comparison)
    for ax, members in parts:
        for c in members:
            for gate, style in (("write", "-"), ("read", "--")):
                if points := c.entropy(gate):
                    ax.plot(*zip(*points, strict=True), style, color=colour[c.mixer], lw=2, label=f"{c.named}, {gate}")
        ax.set_ylim(0, 1.03)
    return over_steps(figure, parts, "gate entropy / log(heads)")


def heads(comparison: Comparison, shown: list[Contender]) -> Figure:
    """Mean share of each head in each write and read gate after training, first seed."""
    rows = [row for contender in shown for row in head_rows(contender)]
    names, loads = zip(*rows, strict=True)
    table = np.array(list(zip_longest(*loads, fillvalue=np.nan))).T  # [gates, heads]
    H = table.shape[1]
    figure, ax = axes(2.6 + 0.55 * H, 1.0 + 0.3 * len(rows))
    largest = max(np.nanmax(table), 2 / H)
    ax.imshow(table, cmap="YlGnBu", vmin=0, vmax=largest, aspect="auto")
    for (y, x), share in np.ndenumerate(table):
        if np.isfinite(share):
            dark = share > 0.6 * largest
            ax.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=8, color="white" if dark else "#333")
    ax.set_yticks(range(len(rows)), names)
    ax.set_xticks(range(H), [str(h) for h in range(H)])
    ax.set(xlabel="head")
    ax.grid(False)
    return figure


def head_rows(contender: Contender) -> list[tuple[str, list[float]]]:
    """(name, mean share of each head) of each gate, for queries and other positions apart where a task has both."""
    rows = []
    for gate in contender.gates:
        name = f"{contender.label}, layer {gate['layer']}, {gate['gate']}"
        if contender.metric.higher_is_better and gate["load_asked"] and gate["load_other"]:
            rows += [(f"{name}, queries", gate["load_asked"]), (f"{name}, other", gate["load_other"])]
        else:
            rows.append((name, gate["load"]))
    return rows


# Name -> (plot, what a contender must have to be in it).
PLOTS: dict[str, tuple[Callable[[Comparison, list[Contender]], Figure], Callable[[Contender], Any]]] = {
    "curves": (learning_curves, Contender.curve),
    "scores": (final_scores, lambda c: c.by_seed),
    "lengths": (by_length, lambda c: c.by_length),
    "alignments": (alignments, lambda c: c.alignment),
    "entropy": (gate_entropy, lambda c: c.entropy("write") or c.entropy("read")),
    "heads": (heads, lambda c: c.gates),
}


# --- sweeps ----------------------------------------------------------------------------------------------------------
def draw_sweep(sweep: Sweep) -> dict[str, tuple[str, Figure]]:
    """Name -> (caption, figure), as `draw` returns them."""
    lost = any(contender.lost for comparison in sweep.comparisons for contender in comparison.contenders)
    survivors = " that did not diverge" if lost else ""
    means = f"Score against {sweep.field}: the mean with its standard deviation over seeds{survivors}."
    by_size = (
        f"Score against the numbers in the state, at each {sweep.field}. Mixers with states of equal size are drawn "
        "side by side."
    )
    with matplotlib.rc_context(STYLE):
        return {"score": (means, by_value(sweep)), "capacity": (by_size, by_state(sweep))}


def by_value(sweep: Sweep) -> Figure:
    numbers = all(isinstance(value, int | float) for value in sweep.values)
    place = {value: value if numbers else i for i, value in enumerate(sweep.values)}  # value -> position on the axis
    figure, ax = lines(sweep, lambda i, value, c: place[value], sweep.field)
    spread(ax, place)
    return figure


def by_state(sweep: Sweep) -> Figure:
    place = lambda i, value, c: c.state * APART**i  # noqa: E731
    figure, ax = lines(sweep, place, "state (numbers per sequence)")
    for i, own in enumerate(sweep.mixers.values()):
        for value, c in finished(own):
            named: Any = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7, "color": SOFT}
            ax.annotate(str(value), (place(i, value, c), c.mean * c.metric.scale), **named)
    states = sorted({c.state for own in sweep.mixers.values() for _, c in finished(own)})
    ax.set_xscale("symlog", linthresh=1)  # a state may have 0 numbers
    ax.set_xticks(states, [compact(state) for state in states])
    ax.xaxis.set_minor_locator(NullLocator())
    return figure


def lines(sweep: Sweep, place: Callable[[int, Any, Contender], float], xlabel: str) -> tuple[Figure, Axes]:
    """A line for each mixer through its mean scores, with the spread of its seeds. place(i, value, contender) is the
    place of a score on the x axis."""
    (figure, ax), colour = axes(5.2, 3.8), colours(sweep.comparisons[0])
    for i, (label, own) in enumerate(sweep.mixers.items()):
        x = [place(i, value, c) for value, c in finished(own)]
        scores, spreads = ([getattr(c, name) * c.metric.scale for _, c in finished(own)] for name in ("mean", "spread"))
        shown = colour[next(iter(own.values())).mixer]
        ax.errorbar(x, scores, spreads, fmt="o-", capsize=3, lw=2, ms=5, label=label, color=shown)
    ax.set(xlabel=xlabel, ylabel=sweep.comparisons[0].metric.axis)
    legend(ax, len(sweep.mixers))
    return figure, ax


def finished(own: dict[Any, Contender]) -> list[tuple[Any, Contender]]:
    """The values at which a mixer has a score, and its results there."""
    return [(value, c) for value, c in own.items() if c.by_seed]
