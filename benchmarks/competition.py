"""Which part of softmax linear attention does the work? The runs behind docs/competition.md.

    python benchmarks/competition.py run main …     the studies named, or all of them; what is done is not repeated
    python benchmarks/competition.py draw           the picture of the main one
    python benchmarks/competition.py show main …    their tables: mean ± spread, and the gain over the backbone of the
                                                    same seed with its 95 % interval (Student's t over seeds)

A study's folder under --output also holds the report that `headrace compare` writes.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from headrace.report.style import PALETTE, STYLE
from headrace.studies.compare.page import write_report
from headrace.studies.compare.plan import ArmRecipe, Plan, Shape, Study
from headrace.studies.compare.pool import place_workers
from headrace.studies.compare.run import complete
from headrace.studies.compare.summary import Comparison, Contender, summarise
from headrace.studies.compare.terminal import board
from headrace.tasks import Digits, Pair
from headrace.utils.device import all_devices
from headrace.utils.integrity import read_json
from headrace.utils.provenance import claim

console = Console(width=None if Console().is_terminal else 140)
app = typer.Typer(add_completion=False, help=__doc__)
Names = Annotated[list[str] | None, typer.Argument(help="Studies; all without any.", show_default=False)]
Folder = Annotated[Path, typer.Option("--output", help="Of all studies.")]

SQUARE = "heads.expand_k=1, heads.expand_v=1"  # keys as wide as values: the states of all backbones are equally large
CONVOLVED = ("deltanet", "gated-deltanet")  # a short convolution mixes pairs here, which are one to a position: off
BACKBONES = ("linear-attention", "retnet", "gla", "deltanet", "gated-deltanet")
ACTIVATIONS = ("sigmoid", "softmax", "null")
SIDES = {"both": "", "write": ", competition.read=none", "read": ", competition.write=none"}


def gated(backbone: str, activation: str = "softmax", side: str = "both", more: str = "") -> str:
    chosen = "" if activation == "softmax" else f", competition.activation={activation}"
    return f"softmax-{backbone}({square(backbone)}{more}{chosen}{SIDES[side]})"


def plain(backbone: str, more: str = "") -> str:
    return f"{backbone}({square(backbone)}{more})"


def square(backbone: str) -> str:
    return f"{SQUARE}, inputs.conv=0" if backbone in CONVOLVED else SQUARE


def trio(backbone: str, more: str = "") -> tuple[str, ...]:
    return plain(backbone, more), gated(backbone, "sigmoid", more=more), gated(backbone, more=more)


def trios(backbones: Sequence[str] = BACKBONES, more: str = "") -> tuple[str, ...]:
    return tuple(mixer for backbone in backbones for mixer in trio(backbone, more))


BASE = Plan("pair", trios(), Pair(), Shape(mlp=0), ArmRecipe(evaluations=5, held_out=256), seeds=3)
WHOLE = tuple(
    mixer
    for backbone in BACKBONES
    for mixer in (plain(backbone), *(gated(backbone, *pair) for pair in product(ACTIVATIONS, SIDES)))
)


def shaped(name: str, mixers: Sequence[str], **shape: int) -> Plan:
    return replace(BASE, name=name, mixers=tuple(mixers), shape=replace(BASE.shape, **shape))


def trained(name: str, mixers: Sequence[str], **recipe: Any) -> Plan:
    return replace(BASE, name=name, mixers=tuple(mixers), recipe=replace(BASE.recipe, **recipe))


DIGITS = replace(
    BASE,
    name="digits",
    task=Digits(),
    shape=Shape(layers=2, mlp=0),
    recipe=ArmRecipe(steps=300, batch_size=32, lr=3e-3, evaluations=5, held_out=359),
)
BOTH_WAYS = tuple(f"bert(mixer={mixer})" for mixer in trios(("retnet", "gla", "gated-deltanet")))
COMPETING = tuple(gated(backbone) for backbone in ("retnet", "gla", "gated-deltanet"))
STUDIES = {
    "main": (replace(BASE, name="pairs-24", mixers=WHOLE, seeds=5),),
    "pairs": tuple(replace(BASE, name=f"pairs-{n}", task=Pair(keys=max(n, 32), pairs=n)) for n in (12, 48)),
    "heads": tuple(shaped(f"heads-{h}", trios(BACKBONES[1:]), heads=h) for h in (2, 4, 16)),
    "state": tuple(
        shaped(f"width-{d}-heads-{h}", trios(("retnet", "gla")), hidden_size=d, heads=h)
        for d, h in ((32, 2), (128, 32))
    ),
    "gates": (
        *(
            trained(f"{kind}-{std:g}", COMPETING, gate_std=std, gate_init=kind)
            for kind, std in (("normal", 0.02), ("normal", 0.3), ("orthogonal", 0.3))
        ),
        *(trained(f"rate-{rate:g}", COMPETING, gate_lr=rate) for rate in (0.1, 0.3, 3.0, 10.0)),
    ),
    "rotary": (
        replace(BASE, name="rotary", mixers=trios(("gla", "gated-deltanet"), ", inputs.rotary=true")),
        replace(BASE, name="plain", mixers=trios(("retnet",), ", inputs.rotary=false")),
    ),
    "digits": (replace(DIGITS, seeds=5), replace(DIGITS, name="digits-both-ways", mixers=BOTH_WAYS)),
}


def study(name: str) -> Study:
    return Study(name, f"Which part does the work? {name}", STUDIES[name])


def chosen(names: list[str] | None) -> list[str]:
    return names or list(STUDIES)


@app.command()
def run(
    names: Names = None,
    output: Folder = Path("runs/competition"),
    workers: Annotated[int, typer.Option()] = 2,
) -> None:
    for name in chosen(names):
        folder, asked = output / name, study(name)
        claim(folder, asked.to_json())
        with board(asked, console) as progress:
            results = complete(asked, folder, progress.listen, place_workers(all_devices(None), workers))
        console.print(f"{name}: {write_report(results, folder)}")


@app.command()
def show(
    names: Names = None,
    output: Folder = Path("runs/competition"),
    markdown: Annotated[bool, typer.Option("--markdown")] = False,
) -> None:
    for name in chosen(names):
        if (output / name / "results.json").exists():
            for comparison in read(output / name):
                print_table(comparison, markdown)


def read(folder: Path) -> list[Comparison]:
    return summarise(read_json(folder / "results.json"))


# --- tables ----------------------------------------------------------------------------------------------------------
def parts(mixer: str) -> tuple[str, str, str]:
    """(backbone, activation, side) of one of the expressions above."""
    mixer = mixer.removeprefix("bert(mixer=")
    name = mixer.partition("(")[0]
    if not name.startswith("softmax-"):
        return name, "none", ""
    activation = re.search(r"activation=(\w+)", mixer)
    side = next((side for side, text in SIDES.items() if text and text in mixer), "both")
    return name.removeprefix("softmax-"), activation[1] if activation else "softmax", side


def gains(contender: Contender, base: Contender) -> list[float]:
    shared = sorted(set(contender.by_seed) & set(base.by_seed))
    return [contender.by_seed[seed] - base.by_seed[seed] for seed in shared]


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval."""
    if len(values) < 2:
        return statistics.fmean(values), float("nan")
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), half


HEAD = ("backbone", "gates", "on", "accuracy, %", "gain, points", "95 % interval", "state, bytes")


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    bases = {parts(c.mixer)[0]: c for c in comparison.contenders if parts(c.mixer)[1] == "none"}
    rows = []
    for contender in (c for c in comparison.contenders if c.by_seed):
        backbone, activation, side = parts(contender.mixer)
        gain, around = "", ""
        if activation != "none" and backbone in bases:
            mean, half = interval(gains(contender, bases[backbone]))
            gain, around = f"{100 * mean:+.1f}", f"{100 * (mean - half):+.1f} … {100 * (mean + half):+.1f}"
        score = f"{100 * contender.mean:.1f} ± {100 * contender.spread:.1f}"
        rows.append((backbone, activation, side, score, gain, around, f"{contender.constant('state_bytes'):,}"))
    return rows


def print_table(comparison: Comparison, markdown: bool) -> None:
    title = f"{comparison.plan['name']}, {comparison.plan['seeds']} seeds"
    if markdown:
        print(f"{title}:\n")
        for row in (HEAD, ["---"] * len(HEAD), *table(comparison)):
            print(f"| {' | '.join(row)} |")
        print()
        return
    shown = Table(*HEAD, title=title, title_justify="left")
    for row in table(comparison):
        shown.add_row(*row)
    console.print(shown)


# --- the picture -----------------------------------------------------------------------------------------------------
def gain_of(contender: Contender, comparison: Comparison) -> tuple[float, float]:
    """Points over the backbone, and half of their 95 % interval."""
    base = find(comparison, plain(parts(contender.mixer)[0]))
    mean, half = interval(gains(contender, base))
    return 100 * mean, 100 * half


@app.command()
def draw(output: Folder = Path("runs/competition"), to: Path = Path("docs/competition.png")) -> None:
    (comparison,) = read(output / "main")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        panels = figure.subplots(1, len(BACKBONES), sharey=True)
        for ax, backbone in zip(panels, BACKBONES, strict=True):
            for i, activation in enumerate(ACTIVATIONS):
                own = {side: find(comparison, gated(backbone, activation, side)) for side in SIDES}
                means, halves = zip(*(gain_of(contender, comparison) for contender in own.values()), strict=True)
                at = [place + 0.22 * (i - 1) for place in range(len(SIDES))]
                ax.errorbar(at, means, halves, fmt="o", ms=5, capsize=3, color=PALETTE[i], label=activation)
            base = find(comparison, plain(backbone))
            ax.axhline(0, color="#333", lw=1)
            ax.set(title=f"{backbone}\n{100 * base.mean:.0f} % without gates")
            ax.title.set_fontsize(10)
            ax.set_xticks(range(len(SIDES)), list(SIDES))
        panels[0].set_ylabel("gain in recall (points, 95 % interval)")
        panels[0].legend(fontsize=8, title="gates")
        figure.savefig(to, dpi=120)
    console.print(f"{to}: {comparison.plan['seeds']} seeds")


def find(comparison: Comparison, mixer: str) -> Contender:
    return next(contender for contender in comparison.contenders if contender.mixer == mixer)


if __name__ == "__main__":
    app()
