"""What was measured as pictures and one page."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..report.page import Page, Section, picture
from ..report.plots import PALETTE, STYLE
from .models import PEERS
from .plan import MEASURED, Plan
from .results import backbones, compressions, overhead

TITLES = {
    "memory": ("Peak memory of a training step", "bytes", "tokens × rows"),
    "training": ("Training throughput", "tokens a second", "tokens × rows"),
    "prefill": ("Time to first token", "seconds", "tokens of the prompt"),
    "decoding": ("Decoding", "seconds a token", "tokens of the context"),
}
CAPTION = "Solid: the backbone; dashed: its heads compete; dotted: transformers' own model. Both axes are logarithmic."


def write_report(held: list[dict[str, Any]], lines: list[dict[str, Any]], plan: Plan, folder: Path, command: str) -> Path:
    shape, environments = plan.shape, []
    for one in held:
        about = {name: value for name, value in one["environment"].items() if name not in ("date", "threads_per_arm")}
        if about not in environments:
            environments.append(about)
    about = (
        f"{len(plan.models)} models of {shape.layers} layers, {shape.hidden_size} wide, {shape.heads} heads, vocabulary "
        f"{shape.vocab_size:,}, in {plan.dtype} on {plan.device} with {plan.threads} thread{'s' * (plan.threads > 1)}; "
        f"times are {plan.clock}, medians of {plan.rounds} rounds in which all models took turns in one process."
    )
    sections = [overheads(held, plan), *(measured(what, lines, plan, folder) for what in present(held))]
    if found := compressed(held, plan, folder):
        sections.append(found)
    return Page("What it costs", about, sections, command, environments).write(folder / "report.html")


def present(held: list[dict[str, Any]]) -> list[str]:
    return [what for what in MEASURED if any(one["point"]["what"] == what for one in held)]


def overheads(held: list[dict[str, Any]], plan: Plan) -> Section:
    header = ("backbone", *(TITLES[what][0] for what in present(held)))
    rows = [(name, *(str(overhead(held, name, what)) for what in present(held))) for name in backbones(plan)]
    about = (
        "Cost with competition over cost without it, in pairs from one round at one point: the median over all of them, "
        "± half the distance of the quartiles."
    )
    return Section("What competition costs", about, header=header, rows=rows)


def measured(what: str, lines: list[dict[str, Any]], plan: Plan, folder: Path) -> Section:
    title, unit, place = TITLES[what]
    own = [line for line in lines if line["what"] == what]
    places = list(dict.fromkeys((line["length"], line["batch"]) for line in own))
    by_model = {name: {(x["length"], x["batch"]): x for x in own if x["model"] == name} for name in plan.models}
    rows = [(name, *(cell(what, there.get(place)) for place in places)) for name, there in by_model.items()]
    figure = curves({n: [(L * B, value(what, x)) for (L, B), x in t.items()] for n, t in by_model.items()}, place, unit)
    left_out = [
        f"{line['model']} is left out at {line['length']:,} × {line['batch']}: {line['left_out']}."
        for line in own if line["left_out"]
    ]  # fmt: skip
    if what == "decoding":
        left_out += [f"{how}: {', '.join(names)}." for how, names in reached(own).items()]
    header = ("model", *(f"{length:,} × {batch}" if batch > 1 else f"{length:,}" for length, batch in places))
    drawn = [picture(f"{title}, {unit}. {CAPTION}", figure, folder / f"{what}.png")]
    return Section(title, f"{unit}, by {place}", left_out, header, rows, drawn)


def reached(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """How a context was reached, and by which models."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        if line["how"]:
            found.setdefault(f"Context by {line['how']}", {})[line["model"]] = None
    return {how: list(names) for how, names in found.items()}


def value(what: str, line: dict[str, Any]) -> float | None:
    text = line[{"memory": "bytes", "training": "tokens_per_second"}.get(what, "seconds")]
    return None if line["left_out"] else float(text)


def cell(what: str, line: dict[str, Any] | None) -> str:
    if line is None or (number := value(what, line)) is None:
        return "–"
    if what == "memory":
        return f"{number / 2**20:,.0f} MiB"
    text = f"{number:,.0f}" if what == "training" else f"{number * 1e3:,.1f} ms"
    return f"{text} ±{float(line['spread']):.0%}"


def curves(series: dict[str, list[tuple[float, float | None]]], xlabel: str, ylabel: str) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2))
        ax = figure.add_subplot()
        for name, pairs in series.items():
            if points := sorted((x, y) for x, y in pairs if y is not None):
                ax.plot(*zip(*points, strict=True), label=name, lw=1.8, ms=4, **look(name, list(series)))
        finish(ax, xlabel, ylabel)
    return figure


def look(name: str, names: list[str]) -> dict[str, Any]:
    """A backbone and its softmax version share a colour."""
    base = name.removeprefix("softmax-")
    known = list(dict.fromkeys(other.removeprefix("softmax-") for other in names))
    style = ":" if name in PEERS else "-" if base == name else "--"
    return {"color": PALETTE[known.index(base) % len(PALETTE)], "ls": style, "marker": "x" if style == "--" else "o"}


def finish(ax: Axes, xlabel: str, ylabel: str) -> None:
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)


def compressed(held: list[dict[str, Any]], plan: Plan, folder: Path) -> Section | None:
    """The cache of the transformer over each state."""
    found = compressions(held, plan)
    if not found:
        return None
    contexts = sorted({c.context for c in found})
    by_model = {name: {c.context: c for c in found if c.model == name} for name in dict.fromkeys(c.model for c in found)}
    rows = [
        (name, *(f"{own[t].found:,.3g}× ({own[t].said:,.3g}×)" if t in own else "–" for t in contexts))
        for name, own in by_model.items()
    ]
    figure = curves(
        {name: [(t, c.found) for t, c in own.items()] for name, own in by_model.items()}, "tokens of the context, t",
        "bytes of the cache over bytes of the state",
    )  # fmt: skip
    about = (
        "How many times larger the keys and values of softmax attention are than the state, in bytes, with convolutions "
        "and all else that the state holds; in brackets t(d_k + d_v)/(d_k d_v), which is 2t/d where d_k = d_v = d."
    )
    header = ("mixer", *(f"t = {t:,}" for t in contexts))
    drawn = [picture("What a state saves, by the length of the context.", figure, folder / "compression.png")]
    return Section("Compression: cache over state", about, (), header, rows, drawn)
