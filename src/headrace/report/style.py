"""Colours and matplotlib settings of all pictures; the colours are those of style.css."""

from typing import Any

PALETTE = (
    "#2f6f9f", "#d1495b", "#c98a1b", "#3a8f6b", "#7b5ea7", "#8c6d46", "#d07ab5", "#6c757d", "#8f9d1f", "#35a0b4",
    "#e07b39", "#5b7fd4",
)  # fmt: skip
INK, SOFT, LINE = "#1d2733", "#5d6b7a", "#dfe5eb"
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.grid": True,
    "grid.color": LINE,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 110,
    "svg.fonttype": "none",
}
