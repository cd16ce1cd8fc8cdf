"""A study that repeats one comparison at several values of a field: scores by the value and by the state size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..report.numbers import compact
from ..report.style import SOFT, STYLE
from .findings import at_chance, diverged, headline
from .pairwise import Difference
from .plots import axes, colours, legend, spread
from .summary import Comparison, Contender, show_contender, summarize

APART = 1.03  # factor on the x axis between mixers with states of equal size, so that they do not overlap


@dataclass(frozen=True)
class Sweep:
    field: str
    values: list[Any]
    comparisons: list[Comparison]  # one for each value

    @property
    def mixers(self) -> dict[str, list[tuple[Any, Contender]]]:
        """Label -> (value, contender) for every value at which the mixer has a score."""
        points: dict[str, list[tuple[Any, Contender]]] = {}
        for value, comparison in zip(self.values, self.comparisons, strict=True):
            for contender in comparison.contenders:
                points.setdefault(contender.label, []).extend([(value, contender)] if contender.by_seed else [])
        return points

    def table(self) -> list[list[str]]:
        """A row for each mixer: its label and a cell for each value."""
        rows = []
        for label, points in self.mixers.items():
            cells = {value: show_contender(contender) for value, contender in points}
            rows.append([label, *(cells.get(value, "diverged") for value in self.values)])
        return rows


def read(results: dict[str, Any]) -> Sweep | None:
    about = results["study"].get("sweep")
    return Sweep(about["field"], about["values"], summarize(results)) if about else None


def draw(sweep: Sweep) -> dict[str, tuple[str, Figure]]:
    """Name -> (caption, figure), like `plots.draw`."""
    by_size = (
        f"Score against the state size in bytes, at each {sweep.field}. Mixers with states of equal size are drawn "
        "side by side."
    )
    lost = any(contender.lost for comparison in sweep.comparisons for contender in comparison.contenders)
    survivors = " that did not diverge" if lost else ""
    with matplotlib.rc_context(STYLE):
        return {
            "score": (
                f"Score against {sweep.field}: the mean with its standard deviation over seeds{survivors}.",
                curve(sweep),
            ),
            "capacity": (by_size, capacity(sweep)),
        }


def curve(sweep: Sweep) -> Figure:
    figure, ax = axes(5.2, 3.8)
    numbers = all(isinstance(value, int | float) for value in sweep.values)
    place = {value: value if numbers else i for i, value in enumerate(sweep.values)}  # value -> position on the axis
    for label, points in sweep.mixers.items():
        line(sweep, ax, label, [(place[value], contender) for value, contender in points])
    spread(ax, place)
    ax.set(xlabel=sweep.field, ylabel=sweep.comparisons[0].metric.axis)
    legend(ax, len(sweep.mixers))
    return figure


def capacity(sweep: Sweep) -> Figure:
    figure, ax = axes(5.2, 3.8)
    for i, (label, points) in enumerate(sweep.mixers.items()):
        spots = [(c.state * APART**i, c) for _, c in points]
        line(sweep, ax, label, spots)
        for (value, c), (x, _) in zip(points, spots, strict=True):
            named: Any = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7, "color": SOFT}
            ax.annotate(str(value), (x, c.mean * c.metric.scale), **named)
    states = sorted({c.state for points in sweep.mixers.values() for _, c in points})
    ax.set_xscale("symlog", linthresh=1)  # a state may have 0 numbers
    ax.set_xticks(states, [compact(state) for state in states])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="state (numbers per sequence)", ylabel=sweep.comparisons[0].metric.axis)
    legend(ax, len(sweep.mixers))
    return figure


def line(sweep: Sweep, ax: Axes, label: str, spots: list[tuple[Any, Contender]]) -> None:
    """A point with the spread of its seeds at each (place, contender)."""
    colour = colours(sweep.comparisons[0])[spots[0][1].mixer] if spots else None
    scores, spreads = ([getattr(c, name) * c.metric.scale for _, c in spots] for name in ("mean", "spread"))
    ax.errorbar([x for x, _ in spots], scores, spreads, fmt="o-", capsize=3, lw=2, ms=5, label=label, color=colour)


def answer(sweep: Sweep, tests: Sequence[Sequence[Difference]]) -> str:
    """The verdict at each value on softmax mixers and their backbones or, without such a pair, the answer at each
    value. tests: of `pairwise.judged`."""
    verdicts: dict[tuple[str, str], dict[str, list[str]]] = {}
    for value, own in zip(sweep.values, tests, strict=True):
        for d in (one for one in own if one.kind == "backbone"):
            verdicts.setdefault((d.a.label, d.b.label), {}).setdefault(d.verdict, []).append(str(value))
    clauses = [
        f"{a} over {b}, by {sweep.field}: " + ", ".join(f"{verdict} at {', '.join(at)}" for verdict, at in said.items())
        for (a, b), said in verdicts.items()
    ]
    return f"{'; '.join(clauses)}." if clauses else headline(sweep.comparisons, tests)


def findings(sweep: Sweep) -> list[str]:
    return [
        f"At {sweep.field}={value}: {sentence}"
        for value, comparison in zip(sweep.values, sweep.comparisons, strict=True)
        for sentence in (*at_chance(comparison), *diverged(comparison))
    ]
