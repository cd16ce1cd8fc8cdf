"""Writes the report of a comparison: PNG pictures, and report.html with the pictures as SVG."""

import io
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ...report.page import template
from ...report.style import INK, LINE, PALETTE, SOFT
from ...utils.provenance import sentence
from . import sweep
from .conditions import conditions
from .example import about, example, guessing
from .findings import findings, headline
from .plots import colours, draw
from .summary import Comparison, Contender, show, show_contender, summarise, task_of

SHOWN = 3  # number of findings shown; the rest are folded
HEADER = ("mixer", "held-out score", "per seed", "parameters", "state, bytes", "training tokens/s")
THEME = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)"} | {
    colour: f"var(--mixer-{i})" for i, colour in enumerate(PALETTE)
}
BROAD = 6.0  # width in inches from which a picture has a row of its own


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Draws the pictures, writes them and report.html into the folder, and returns the path of report.html."""
    comparisons, over = summarise(results), sweep.read(results)
    page = template("comparison.html", "headrace.studies.compare")
    path, beside = folder / "report.html", folder / ".report.html"
    whole = page.render(
        results=results,
        headline=f"{sweep.answer(over)}." if over else headline(comparisons),
        sweep=whole_sweep(over, folder) if over else None,
        sections=[section(comparison, folder) for comparison in comparisons],
        palette=PALETTE,
        shown=SHOWN,
        mixed=sentence(folder),
    )
    beside.write_text(whole, "utf-8")
    return beside.replace(path)


def section(comparison: Comparison, folder: Path) -> dict[str, Any]:
    plan, task = comparison.plan, task_of(comparison.plan["task"])
    row = example(task)
    roles = {role for token in row if not isinstance(token, int) for _, role in token.parts}
    order = [role for role in ("key", "value", "query", "filler") if role in roles]
    return {
        "plan": plan,
        "task": {"about": about(task), "guessing": guessing(task), "example": row, "roles": order},
        "conditions": conditions(comparison),
        "sentences": findings(comparison),
        "header": HEADER,
        "rows": [line(c, comparison, cells(c)) for c in comparison.shown],
        "sizes": [line(c, comparison, sizes(c)) for c in comparison.shown],
        "pictures": saved(draw(comparison), folder, plan["name"]),
    }


def whole_sweep(over: sweep.Sweep, folder: Path) -> dict[str, Any]:
    first = over.comparisons[0]
    by_label = {contender.label: contender for comparison in over.comparisons for contender in comparison.contenders}
    return {
        "header": [f"{over.field}={value}" for value in over.values],
        "rows": [line(by_label[label], first, scores) for label, *scores in over.table()],
        "sentences": sweep.findings(over),
        "pictures": saved(sweep.draw(over), folder, f"by-{over.field}"),
    }


def line(contender: Contender, comparison: Comparison, cells: list[str]) -> dict[str, Any]:
    """A row of a table."""
    return {
        "label": contender.label,
        "mixer": contender.mixer,
        "colour": THEME[colours(comparison)[contender.mixer]],
        "cells": cells,
    }


def cells(c: Contender) -> list[str]:
    seeds = " · ".join(show(c.metric, score).removesuffix(c.metric.unit).strip() for score in c.by_seed.values())
    numbers = (f"{c.constant(field):,}" for field in ("parameters", "state_bytes"))
    return [show_contender(c) if c.by_seed else "diverged", seeds, *numbers, c.speed]


def sizes(c: Contender) -> list[str]:
    width, flops = c.constant("intermediate_size"), c.constant("flops")
    return [
        c.mixer,
        f"{c.constant('gate_parameters'):,}",
        "–" if width is None else f"{width:,}",
        "not counted" if flops is None else f"{flops:,}",
    ]


def saved(drawn: dict[str, tuple[str, Figure]], folder: Path, name: str) -> list[dict[str, Any]]:
    """Each figure as a PNG file, and as SVG for the page."""
    found = []
    for kind, (caption, figure) in drawn.items():
        figure.savefig(folder / f"{name}-{kind}.png", bbox_inches="tight")
        found.append({"caption": caption, "svg": svg(figure), "broad": figure.get_figwidth() > BROAD})
    return found


def svg(figure: Figure) -> str:
    """The figure in the colours and the font of the page, light or dark."""
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    drawn = file.getvalue()[file.getvalue().index("<svg") :].replace("'DejaVu Sans'", "system-ui")
    for colour, variable in THEME.items():
        drawn = drawn.replace(colour, variable)
    return re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
