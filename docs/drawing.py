"""What the pictures of the manual are drawn with: colours, boxes, arrows and notes. Coordinates are inches."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BLUE, RED, GREEN, AMBER, GREY = "#2f6f9f", "#d1495b", "#3a8f6b", "#c98a1b", "#777777"
plt.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "headrace", "font.family": "sans-serif", "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"], "font.monospace": ["DejaVu Sans Mono", "Menlo", "Consolas"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY, "axes.grid": True,
    "grid.color": "#e3e6ea",
})  # fmt: skip
Point = tuple[float, float]


def canvas(width: float, height: float) -> Axes:
    """Empty axes whose units are inches, with the origin at the lower left."""
    figure = plt.figure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return ax


def box(ax: Axes, middle: Point, size: Point, text: str, colour: str = GREY, **style: object) -> None:
    (x, y), (width, height) = middle, size
    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.07", fc="white", ec=colour
    )
    ax.add_patch(shape)
    ax.text(x, y, text, ha="center", va="center", linespacing=1.35, **style)


def arrow(ax: Axes, start: Point, end: Point, colour: str = GREY, bend: float = 0) -> None:
    curve = f"arc3,rad={bend}"
    ax.add_patch(FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=9, color=colour, connectionstyle=curve, shrinkA=2, shrinkB=2,
        lw=1.2,
    ))  # fmt: skip


def note(ax: Axes, place: Point, text: str, **style: object) -> None:
    ax.text(*place, text, **{"color": "#555555", "ha": "center", "va": "center", "fontsize": 8, **style})
