"""The report of a benchmark: the rows of its CSV file, and a page with pictures and the overhead of competition."""

import csv
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..files.environment import environments
from ..report.numbers import compact, count, spread
from ..report.page import PALETTE, STYLE, Page, Section, picture
from . import MEASURED
from .models import PEERS, checkpoint_config
from .plan import BenchPlan, Point

COLUMNS = (
    "date", "commit", "processor", "device", "threads", "headrace", "torch", "transformers", "python", "dtype", "clock",
    "layers", "hidden_size", "heads", "what", "model", "length", "batch", "rounds", "seconds", "spread",
    "tokens_per_second", "bytes", "how", "left_out",
)  # fmt: skip
FORMS = {"softmax": "", "paper-softmax": ", published form"}  # prefix of a mixer with competition -> how rows name it
TITLES = {  # measurement -> (title, unit, label of the x axis)
    "memory": ("Peak memory of a training step", "bytes", "tokens per row"),
    "training": ("Training throughput", "tokens per second", "tokens per row"),
    "prefill": ("Time to first token", "seconds", "tokens of the prompt"),
    "decoding": ("Decoding", "seconds per token", "tokens of context"),
}
COSTS = {"memory": "peak memory", "training": "training step", "prefill": "first token", "decoding": "decoded token"}
OVERHEAD = (
    "Cost with competition relative to cost without it. A pair is both costs in one round at one point; given are the "
    "median over all pairs and ± half their interquartile range, due to noise and to differences between points."
)
CAPTION = (
    "Solid: backbone; dashed: with competition; dash-dotted: its published form; dotted: model of transformers. Both "
    "axes are logarithmic."
)


def rows(results: list[dict[str, Any]], plan: BenchPlan) -> list[dict[str, Any]]:
    """Rows of the CSV, result for each model at each point."""
    lines = []
    for result in results:
        point = Point(**result["point"])
        for name, measured in result["models"].items():
            row = result["environment"] | result["point"] | measured | sizes(name, plan)
            row |= {"model": name, "dtype": plan.dtype, "clock": result["clock"]}
            seconds = row.pop("seconds", None) or []
            row["rounds"] = len(seconds)
            if seconds:
                middle, around = median(seconds), spread(seconds)
                row |= {"seconds": f"{middle:.6g}", "tokens_per_second": f"{point.tokens / middle:.5g}"}
                row["spread"] = None if around is None else f"{around:.3f}"
            lines.append({name: row.get(name) for name in COLUMNS})
    return lines


def sizes(name: str, plan: BenchPlan) -> dict[str, int]:
    """Layers, width and heads of a model: those of the plan, or of the checkpoint."""
    if (config := checkpoint_config(name)) is None:
        return {size: getattr(plan.shape, size) for size in ("layers", "hidden_size", "heads")}
    return {"layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "heads": config.num_heads}


def write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


# --- the page --------------------------------------------------------------------------------------------------------
def write_report(results: list[dict[str, Any]], lines: list[dict[str, Any]], plan: BenchPlan, folder: Path) -> Path:
    shape = plan.shape
    about = (
        f"{count(len(plan.models), 'model')} of {count(shape.layers, 'layer')}, {shape.hidden_size} wide, "
        f"{count(shape.heads, 'head')} and a vocabulary of {shape.vocab_size:,}, in {plan.dtype} on {plan.device} with "
        f"{count(plan.threads, 'thread')}. Times are {plan.clock}: the median of {plan.rounds} rounds, in which all "
        "models took turns in one process, ± half the interquartile range. Models of equal width and depth may "
        "differ in parameters: Mamba-2 has no MLP. Checkpoints have their own sizes."
    )
    sections = [overheads(results, plan), *(measured(what, lines, plan, folder) for what in present(results))]
    return Page("Cost of competition", [about], sections, environments(results)).write(folder / "report.html")


def present(results: list[dict[str, Any]]) -> list[str]:
    return [what for what in MEASURED if any(result["point"]["what"] == what for result in results)]


def overheads(results: list[dict[str, Any]], plan: BenchPlan) -> Section:
    """Rows of every model whose backbone is measured too."""
    costs = present(results)
    pairs = [(name, form) for name in plan.models for form in FORMS if f"{form}-{name}" in plan.models]
    rows = [(name + FORMS[form], *(overhead(results, name, what, form) for what in costs)) for name, form in pairs]
    header = ("backbone", *(COSTS[what] for what in costs))
    return Section("Overhead of competition", (OVERHEAD,), header=header, rows=rows)


def overhead(results: list[dict[str, Any]], backbone: str, what: str, form: str = "softmax") -> str:
    """The cost with competition relative to the cost without it, over the pairs of all rounds of all points."""
    ratios: list[float] = []
    for result in results:
        base, competing = (result["models"].get(name, {}) for name in (backbone, f"{form}-{backbone}"))
        if result["point"]["what"] == what and "left_out" not in base | competing:
            pairs = zip(costs(competing, what), costs(base, what), strict=True)
            ratios += [with_it / without for with_it, without in pairs]
    if not ratios:
        return "–"
    middle, around = median(ratios), spread(ratios)
    return f"{middle - 1:+.1%} " + ("(one pair)" if around is None else f"± {around * middle / 2:.1%}")


def costs(measured: dict[str, Any], what: str) -> list[float]:
    return [measured["bytes"]] if what == "memory" else measured["seconds"]


def measured(what: str, lines: list[dict[str, Any]], plan: BenchPlan, folder: Path) -> Section:
    title, unit, place = TITLES[what]
    own = [line for line in lines if line["what"] == what]
    places = list(dict.fromkeys((line["length"], line["batch"]) for line in own))
    by_model = {name: {(x["length"], x["batch"]): x for x in own if x["model"] == name} for name in plan.models}
    rows = [(name, *(cell(what, by_place.get(place)) for place in places)) for name, by_place in by_model.items()]
    left_out = [
        f"{line['model']} is left out at {line['length']:,} × {line['batch']}: {line['left_out']}."
        for line in own if line["left_out"]
    ]  # fmt: skip
    caption, path = f"{title}, {unit}. {CAPTION}", folder / f"{what}.png"
    drawn = [picture(caption, panels(what, by_model, place, unit), path)] if len(left_out) < len(own) else []
    if what == "decoding":
        left_out += [f"{how}: {', '.join(names)}." for how, names in reached(own).items()]
    header = ("model", *(f"{length:,} × {batch}" if batch > 1 else f"{length:,}" for length, batch in places))
    return Section(title, (f"{unit}, by {place}",), header=header, rows=rows, sentences=left_out, pictures=drawn)


def reached(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """How the context was reached -> the models that reached it so."""
    ways = dict.fromkeys(line["how"] for line in lines if line["how"])
    models = {how: dict.fromkeys(line["model"] for line in lines if line["how"] == how) for how in ways}
    return {f"Context by {how}": list(names) for how, names in models.items()}


def value(what: str, line: dict[str, Any]) -> float | None:
    text = line[{"memory": "bytes", "training": "tokens_per_second"}.get(what, "seconds")]
    return None if line["left_out"] else float(text)


def cell(what: str, line: dict[str, Any] | None) -> str:
    if line is None or (number := value(what, line)) is None:
        return "–"
    if what == "memory":
        return f"{number / 2**20:,.0f} MiB"
    text = f"{number:,.0f}" if what == "training" else f"{number * 1e3:,.1f} ms"
    return text + (f" ±{float(line['spread']) / 2:.0%}" if line["spread"] else " (one round)")


def panels(what: str, by_model: dict[str, Any], xlabel: str, ylabel: str) -> Figure:
    """A figure with a panel for each batch size."""
    batches = sorted({batch for lines in by_model.values() for _, batch in lines})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3 + 4 * len(batches), 4.2), layout="constrained")
        grid = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
        for ax, batch in zip(grid, batches, strict=True):
            own = {
                name: [(length, value(what, line)) for (length, rows), line in lines.items() if rows == batch]
                for name, lines in by_model.items()
            }
            draw(ax, own)
            if len(batches) > 1:
                ax.set_title(count(batch, "row"), fontsize=10)
            ax.set_xlabel(xlabel)
        grid[0].set_ylabel(ylabel)
        grid[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
    return figure


def draw(ax: Axes, series: dict[str, list[tuple[int, float | None]]]) -> None:
    for name, pairs in series.items():
        known = {x: y for x, y in sorted(pairs) if y is not None}  # without any, the model is in the legend alone
        ax.plot([*known], [*known.values()], label=name, lw=1.8, ms=4, **line_style(name, list(series)))
    ax.set(xscale="log", yscale="log")
    ticks = sorted({x for pairs in series.values() for x, _ in pairs})
    ax.set_xticks(ticks, [compact(x) for x in ticks], fontsize=8)
    ax.minorticks_off()
    low, high = ax.get_ylim()
    steps = [n * 10.0**power for power in range(-7, 13) for n in (1, 2, 5)]
    narrow = MaxNLocator(5).tick_values(low, high)  # for a range with too few of the 1-2-5 steps
    ax.set_yticks([y for y in (steps if high > 8 * low else narrow) if low <= y <= high])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: compact(y)))


def line_style(name: str, names: list[str]) -> dict[str, Any]:
    """Line style of a model; a backbone and its versions with competition share a colour."""
    base = backbone(name)
    known = list(dict.fromkeys(map(backbone, names)))
    dash = ":" if name in PEERS else "-" if base == name else "-." if name.startswith("paper-") else "--"
    return {"color": PALETTE[known.index(base) % len(PALETTE)], "ls": dash, "marker": "x" if base != name else "o"}


def backbone(name: str) -> str:
    return name.removeprefix("paper-").removeprefix("softmax-")
