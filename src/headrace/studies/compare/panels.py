"""Pictures of a comparison with more contenders than colours: a panel for each backbone, with all others in grey."""

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ...report.style import LINE, PALETTE
from .summary import Comparison, Contender

COLUMNS = 5
(PLAIN, COMPETING), OTHERS = PALETTE[:2], LINE


def colour(contender: Contender) -> str:
    return COMPETING if contender.gated else PLAIN


def panels(comparison: Comparison, draw: Callable[[Axes, list[Contender]], None], keep: Callable[[Contender], bool]):
    """A figure with a panel for each backbone with a contender that `keep` accepts, or None if there is none.
    `draw(axes, contenders)` fills a panel."""
    families = [(name, members) for name, members in comparison.families() if any(map(keep, members))]
    if not families:
        return None
    rows = -(-len(families) // COLUMNS)
    figure = Figure(figsize=(2.1 * COLUMNS, 0.7 + 1.55 * rows), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat
    for ax, (name, members) in zip(grid, families, strict=False):
        draw(ax, members)
        ax.set_title(name, fontsize=8, loc="left")
        ax.tick_params(labelsize=7)
    for ax in list(grid)[len(families) :]:
        ax.set_axis_off()
    return figure


def curves(comparison: Comparison) -> Figure | None:
    scale, metric = comparison.metric.scale, comparison.metric
    lines = {c.mixer: [(step, mean * scale) for step, mean, *_ in c.curve()] for c in comparison.contenders}

    def draw(ax: Axes, members: list[Contender]) -> None:
        for points in lines.values():
            ax.plot(*zip(*points, strict=True), color=OTHERS, lw=0.6)
        for c in members:
            ax.plot(*zip(*lines[c.mixer], strict=True), color=colour(c), lw=1.8)

    figure = panels(comparison, draw, lambda c: bool(lines[c.mixer]))
    entries = {"backbone": {"color": PLAIN}, "with competition": {"color": COMPETING}, "others": {"color": OTHERS}}
    return finished(figure, entries, f"held-out {metric.name} ({metric.unit})")


def entropy(comparison: Comparison) -> Figure | None:
    def draw(ax: Axes, members: list[Contender]) -> None:
        for c in members:
            for gate, style in (("write", "-"), ("read", "--")):
                if points := c.entropy(gate):
                    ax.plot(*zip(*points, strict=True), style, color=COMPETING, lw=1.6)
        ax.set_ylim(0, 1.05)

    figure = panels(comparison, draw, lambda c: bool(c.entropy("write") or c.entropy("read")))
    entries = {"write": {"color": COMPETING}, "read": {"color": COMPETING, "ls": "--"}}
    return finished(figure, entries, "gate entropy / log(heads)")


def finished(figure: Figure | None, entries: dict[str, dict[str, Any]], ylabel: str) -> Figure | None:
    """Adds the legend and axis labels that all panels share; None stays None."""
    if figure is not None:
        lines = [Line2D([], [], **style) for style in entries.values()]
        figure.legend(lines, list(entries), loc="outside upper right", ncols=len(entries), fontsize=8)
        figure.supxlabel("step", fontsize=9)
        figure.supylabel(ylabel, fontsize=9)
    return figure
