"""The report folder's files: pictures, results.json, and report.html with the pictures inside."""

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure

from ..provenance import sentence
from . import sweep
from .plots import draw
from .summary import Comparison, Contender, show, show_contender, summarise
from .words import words


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Draw and write everything; the path of report.html."""
    sections = [section(comparison, folder) for comparison in summarise(results)]
    over = sweep.read(results)
    whole = whole_sweep(over, folder) if over else None
    templates = Environment(loader=PackageLoader("headrace.report", "."), autoescape=True, trim_blocks=True)
    page, beside = folder / "report.html", folder / ".report.html"
    beside.write_text(
        templates.get_template("template.html").render(
            results=results, sweep=whole, sections=sections, mixed=sentence(folder)
        ),
        "utf-8",
    )
    return beside.replace(page)


def section(comparison: Comparison, folder: Path) -> dict[str, Any]:
    plan = comparison.plan
    return {
        "plan": plan,
        "sentences": words(comparison),
        "rows": [row(contender, comparison) for contender in comparison.shown],
        "pictures": saved(draw(comparison), folder, plan["name"]),
    }


def whole_sweep(over: sweep.Sweep, folder: Path) -> dict[str, Any]:
    return {
        "heads": [f"{over.field}={value}" for value in over.values],
        "rows": over.table(),
        "sentences": sweep.words(over),
        "pictures": saved(sweep.draw(over), folder, f"by-{over.field}"),
    }


def saved(drawn: dict[str, tuple[str, Figure]], folder: Path, name: str) -> list[dict[str, str]]:
    return [
        {"caption": caption, "png": inline(figure, folder / f"{name}-{kind}.png")}
        for kind, (caption, figure) in drawn.items()
    ]


def inline(figure: Figure, path: Path) -> str:
    """Save a figure and return it as base64."""
    figure.savefig(path, bbox_inches="tight")
    return base64.b64encode(path.read_bytes()).decode()


def row(contender: Contender, comparison: Comparison) -> dict[str, Any]:
    first, metric = comparison.contenders[0].constant("parameters"), contender.metric
    return {
        "label": contender.label,
        "mixer": contender.mixer,
        "score": show_contender(contender) if contender.by_seed else "diverged",
        "best": bool(comparison.finished) and contender is comparison.finished[0],
        "seeds": [show(metric, score).removesuffix(metric.unit).strip() for score in contender.by_seed.values()],
        "parameters": contender.constant("parameters"),
        "apart": contender.constant("parameters") / first - 1,
        "gate_parameters": contender.constant("gate_parameters"),
        "mlp": contender.constant("intermediate_size"),
        "state_bytes": contender.constant("state_bytes"),
        "speed": contender.speed,
        "seconds": [arm["seconds"] for arm in contender.arms],
    }
