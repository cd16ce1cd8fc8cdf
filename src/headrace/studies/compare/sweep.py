"""A study that repeats one comparison at several values of a field: scores by the value and by the state size."""

from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ...report.numbers import compact
from ...report.style import SOFT, STYLE
from .failures import at_chance
from .pairwise import pairs
from .plots import axes, colours, legend, spread
from .summary import Comparison, Contender, show_contender, summarise

APART = 1.03  # factor on the x axis between mixers with states of equal size, so that they do not overlap


@dataclass(frozen=True)
class Sweep:
    field: str
    values: list[Any]
    comparisons: list[Comparison]  # one for each value

    @property
    def mixers(self) -> dict[str, list[tuple[Any, Contender]]]:
        """Label -> (value, contender) for every value at which the mixer has a score."""
        found: dict[str, list[tuple[Any, Contender]]] = {}
        for value, comparison in zip(self.values, self.comparisons, strict=True):
            for contender in comparison.contenders:
                found.setdefault(contender.label, []).extend([(value, contender)] if contender.by_seed else [])
        return found

    def table(self) -> list[list[str]]:
        """A row for each mixer: its label and a cell for each value."""
        rows = []
        for label, points in self.mixers.items():
            cells = {value: show_contender(contender) for value, contender in points}
            rows.append([label, *(cells.get(value, "diverged") for value in self.values)])
        return rows


def read(results: dict[str, Any]) -> Sweep | None:
    about = results["study"].get("sweep")
    return Sweep(about["field"], about["values"], summarise(results)) if about else None


def draw(sweep: Sweep) -> dict[str, tuple[str, Figure]]:
    """Name -> (caption, figure), like `plots.draw`."""
    with matplotlib.rc_context(STYLE):
        return {
            "score": (f"Score against {sweep.field}: the mean with its standard deviation over seeds.", curve(sweep)),
            "capacity": (
                f"Score against the state size in bytes, at each {sweep.field}. "
                "Mixers with states of equal size are drawn side by side.",
                capacity(sweep),
            ),
        }


def curve(sweep: Sweep) -> Figure:
    figure, ax = axes(sweep.comparisons[0], 5.2, 3.8)
    numbers = all(isinstance(value, int | float) for value in sweep.values)
    place = {value: value if numbers else i for i, value in enumerate(sweep.values)}  # value -> position on the axis
    colour = colours(sweep.comparisons[0])
    for label, points in sweep.mixers.items():
        spots = [(place[value], contender) for value, contender in points]
        line(ax, spots, label=label, color=colour[points[0][1].mixer] if points else None)
    spread(ax, place)
    ax.set(xlabel=sweep.field, ylabel=held_out(sweep))
    legend(figure, ax, len(sweep.mixers))
    return figure


def capacity(sweep: Sweep) -> Figure:
    figure, ax = axes(sweep.comparisons[0], 5.2, 3.8)
    colour, states = colours(sweep.comparisons[0]), set()
    for i, (label, points) in enumerate(sweep.mixers.items()):
        spots = [(c.constant("state_bytes") * APART**i, c) for _, c in points]
        line(ax, spots, label=label, color=colour[points[0][1].mixer] if points else None)
        states |= {c.constant("state_bytes") for _, c in points}
        for (value, c), (x, _) in zip(points, spots, strict=True):
            named: Any = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7, "color": SOFT}
            ax.annotate(str(value), (x, c.mean * c.metric.scale), **named)
    ax.set_xscale("symlog", linthresh=1)  # a state may have 0 bytes
    ax.set_xticks(sorted(states), [compact(state) for state in sorted(states)])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set(xlabel="state (bytes per sequence)", ylabel=held_out(sweep))
    legend(figure, ax, len(sweep.mixers))
    return figure


def line(ax: Axes, spots: list[tuple[Any, Contender]], **style: Any) -> None:
    """A point with the spread of its seeds at each (place, contender)."""
    scale = spots[0][1].metric.scale if spots else 1.0
    scores, spreads = ([getattr(c, name) * scale for _, c in spots] for name in ("mean", "spread"))
    ax.errorbar([x for x, _ in spots], scores, spreads, fmt="o-", capsize=3, lw=2, ms=5, **style)


def held_out(sweep: Sweep) -> str:
    metric = sweep.comparisons[0].metric
    return f"held-out {metric.name} ({metric.unit})"


def answer(sweep: Sweep) -> str:
    """The values at which softmax mixers beat their backbones or, without such a pair, the scores of each mixer."""
    return "; ".join(differences(sweep) or reaches(sweep)) or "no model has a score"


def findings(sweep: Sweep, planned: bool = False) -> list[str]:
    """planned: whether a plan names the differences to be tested, so that none is judged here."""
    lost = [
        f"At {sweep.field}={value}: {sentence}"
        for value, comparison in zip(sweep.values, sweep.comparisons, strict=True)
        for sentence in at_chance(comparison)
    ]
    return [*lost, *(f"{clause}." for clause in reaches(sweep) if planned or differences(sweep))]


def reaches(sweep: Sweep) -> list[str]:
    """The best and the worst score of each mixer, with the values of the field at which it has them."""
    said = []
    for label, points in sweep.mixers.items():
        ranked = sorted(points, key=lambda point: point[1].mean, reverse=sweep.comparisons[0].metric.higher_is_better)
        ends = ranked[:1] + ranked[1:][-1:]
        if ends:
            said.append(f"{label}: {', '.join(f'{show_contender(c)} at {sweep.field}={value}' for value, c in ends)}")
    return said


def differences(sweep: Sweep) -> list[str]:
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for value, comparison in zip(sweep.values, sweep.comparisons, strict=True):
        for d in pairs(comparison):
            verdict = "better" if d.better else "worse" if d.worse else "no clear difference"
            found.setdefault((d.a.label, d.b.label), {}).setdefault(verdict, []).append(str(value))
    return [
        f"{a} compared with {b}, by {sweep.field}: "
        + ", ".join(f"{verdict} at {', '.join(values)}" for verdict, values in said.items())
        + " (by 95 % intervals over seeds)"
        for (a, b), said in found.items()
    ]
