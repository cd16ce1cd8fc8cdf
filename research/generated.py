"""What pages take from the rows of studies: the text that a function NAME of this module or of sentences.py returns.

Pages here, and the README and pages of the library, keep it in parts `<!-- research: NAME ARGUMENT ... -->`
(docs/parts.py): `python -m research.generated` writes them, research/tests/test_generated.py compares. A number in a
sentence is such a part, so that the sentence around it can be edited freely.
"""

import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from myst_parser.slugs import github_slugify

from benchmarks.record import markdown
from benchmarks.record import read as read_csv
from docs import parts
from headrace import zoo
from headrace.comparison.defaults import DEFAULTS
from headrace.report import catalog
from headrace.verification.foreign import LAWS

from . import RESULTS, power
from . import study as studies
from .reproduce.experiment import load
from .sentences import MADE as SENTENCES
from .sentences import MEASURED, default_runs, gains, interval, names, paper, reproduced, shown, stated

ROOT = Path(__file__).parents[1]
VERIFIED = ROOT / "benchmarks" / "results" / "verify"
LAB_BOOK = "https://github.com/headrace/headrace/blob/main/research/docs/log.md"


# --- blocks: what programs of this folder print ----------------------------------------------------------------------


def study(*given: str) -> str:
    return re.sub(r"^### ", "#### ", "\n".join(studies.lines(names(given))), flags=re.MULTILINE)


def effects(*given: str) -> str:
    return "\n".join(studies.effects_of(names(given)))


def others(*given: str) -> str:
    return "\n".join(studies.others_of(names(given)))


def published(*given: str) -> str:
    return "\n".join(studies.published_of(names(given)))


def starts(name: str) -> str:
    return "\n".join(studies.starts_of(name))


def published_text() -> str:
    """What the published form does on text beside the paper's gain, once its study has rows."""
    name, _, form = power.PUBLISHED
    if not studies.kept(name).exists():
        return (
            "The published form has not been trained on text, so that nothing here judges the paper's gain. The plan "
            f"is `research/studies/{name}.yaml`."
        )
    judged = power.Judged(*power.PUBLISHED)
    verdict = "excludes" if judged.excluded else "does not exclude"
    arms = studies.by_arm(name)[power.WHERE]
    none, ungated, default = (
        stated(studies.effect(arms, form, other), 3) for other in ("none", "published without read gate", "softmax")
    )
    return (
        f"GLA in the published form less none is {none} nats a token, which {verdict} the paper's gain of "
        f"{judged.published_gain:.3f}; less the same form without its read gate it is {ungated}, less the "
        f"default {default} ({studies.converged(name)} runs converged)."
    )


def study_if_kept(name: str) -> str:
    """The tables of a study whose runs may not have been made yet."""
    return (
        study(name)
        if studies.kept(name).exists()
        else f"No rows yet: `headrace compare --plan research/studies/{name}.yaml`."
    )


def program(name: str, *given: str) -> str:
    """What `python -m research.NAME show GIVEN` prints."""
    return "\n".join(import_module(f"research.{name}").lines(*given))


def released_needles() -> str:
    """The needles that a released model finds, and what it finds with linear layers, in % of the prompts."""
    rows = read_csv(RESULTS / "needles.csv")
    found = {(row["model"], row["task"], row["tokens"]): f"{100 * float(row['found']):.0f}" for row in rows}
    models, places = (list(dict.fromkeys(key)) for key in zip(*((key[0], key[1:]) for key in found), strict=True))
    header = ["model", *(f"S-NIAH-{task[-1]}, {int(tokens):,}" for task, tokens in places)]
    return "\n".join(markdown(header, [[model, *(found[model, *place] for place in places)] for model in models]))


def negatives() -> str:
    """The titles of the lab book's negative results, as links."""
    log = (ROOT / "research" / "docs" / "log.md").read_text("utf-8")
    titles = re.findall(r"^## (\d{4}-\d\d-\d\d · .*negative.*)$", log, re.MULTILINE)
    return "\n".join(f"- [{title}]({LAB_BOOK}#{github_slugify(title)})" for title in titles)


# --- learning rates and defaults -------------------------------------------------------------------------------------
RATES = ("3e-4", "1e-3", "3e-3", "1e-2", "3e-2")


def searched() -> str:
    """The search of the defaults' learning rates: a row for each task and mixer; in a cell, a score for each seed."""
    found: dict[tuple[str, ...], dict[float, list[str]]] = {}
    for run in default_runs():
        task, search, _ = run["comparison"].partition("-lr-")
        if search:
            key = f"`{task}`", str(run["steps"]), run["mixer"]
            found.setdefault(key, {float(lr): [] for lr in RATES})[run["lr"]].append(shown(run))
    head = ["task", "steps", "mixer", *(f"lr {lr}" for lr in RATES)]
    return "\n".join(markdown(head, ([*key, *map(", ".join, cells.values())] for key, cells in sorted(found.items()))))


def defaults() -> str:
    """What each task's default reaches at seed 0."""
    rows, reported = [], (run for run in default_runs() if run["comparison"] in DEFAULTS)
    for task, own in groupby(reported, lambda run: run["comparison"]):
        runs = list(own)
        settled = f"{sum(run['converged'] for run in runs)} of {len(runs)}"
        reached = ", ".join(f"{run['mixer']} {shown(run)}" for run in runs)
        command = f"`headrace compare --task {task} --seeds 1`"
        rows.append([f"`{task}`", str(runs[0]["steps"]), f"{runs[0]['lr']:g}", settled, reached, command])
    return "\n".join(markdown(["task", "steps", "lr", "converged", "accuracy in %, or loss", "command"], rows))


# --- reproductions ---------------------------------------------------------------------------------------------------


def figures(*experiments: str) -> str:
    """Means over seeds and their 95 % intervals; below them the gains of competition, paired by seed."""
    found = reproduced(*experiments)
    values = {f"`{arm}`": {m: list(own[m].values()) for m in MEASURED} for arm, own in found.items()}
    won = {
        f"`{arm}` less `{competing}`": {m: gains(found[arm][m], found[competing][m]) for m in MEASURED}
        for competing in found
        if "softmax-" in competing and (arm := competing.replace("softmax-", ""))
    }
    rows = (values | won).items()
    cells = ([first, *(interval(own[m], form) for m, form in MEASURED.items())] for first, own in rows)
    return "\n".join(markdown(["models", *MEASURED], cells, ["---", *["--:"] * len(MEASURED)]))


def needles(experiment: str) -> str:
    """The needles that the model of each seed found, %, by length."""
    lengths = {"320": "320 tokens", "640": "640", "1K": "1,024"}
    rows = (
        [f"`{arm}`", *(", ".join(f"{value:.0f}" for value in own[f"S-NIAH-1 {length}"].values()) for length in lengths)]
        for arm, own in reproduced(experiment).items()
    )
    return "\n".join(markdown(["models", *lengths.values()], rows, ["---", *["--:"] * len(lengths)]))


# --- benchmarks and the laws of other libraries ----------------------------------------------------------------------
def speed() -> str:
    """The fastest peer of each measurement."""
    return import_module("tables").speed()


def losses() -> str:
    """The measurements in which another library takes less time than headrace."""
    return import_module("tables").losses()


def benchmark(name: str) -> str:
    """What `python benchmarks/NAME.py show` prints."""
    return "\n".join(import_module(name).lines())


def server() -> str:
    """The speed of the server by load."""
    return import_module("tables").server()


def prefix_cache() -> str:
    """The speed of the server on prompts with one prefix, with and without its cache."""
    return import_module("tables").prefix_cache()


def speculation() -> str:
    """The measurements of speculative decoding."""
    return "\n".join(import_module("states").draft_lines())


def beams() -> str:
    """The measurements of beam search and of several answers."""
    return "\n".join(import_module("states").beam_lines())


def verified() -> str:
    """One row per verified model of another library, and a column for each law that one of them breaks."""
    records = [json.loads(path.read_text("utf-8")) for path in sorted(VERIFIED.glob("*.json"))]
    verdicts = {record["target"]: {row["law"]: row for row in record["laws"]} for record in records}
    broken = [law for law in LAWS if any(_fails(rows.get(law)) for rows in verdicts.values())]
    rows = [(f"`{target}`", *(_verdict(rows.get(law)) for law in broken)) for target, rows in verdicts.items()]
    kept = ", ".join(law for law in LAWS if law not in broken)
    environments = [record["environment"] for record in records]
    packages = [f"{name} {', '.join(sorted({e[name] for e in environments}))}" for name in ("transformers", "torch")]
    dates = sorted({record["date"] for record in records})
    made = f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}, {', '.join(packages)}, on a CPU in float32"
    counts = f"{len(records)} models and layers, {made}. None breaks: {kept}."
    return "\n".join([counts, "", *markdown(("", *broken), rows)])


def _fails(row: dict[str, Any] | None) -> bool:
    return row is not None and row["verdict"] in ("breaks", "raises")


def _verdict(row: dict[str, Any] | None) -> str:
    """A relative error if a law breaks; "refuses" for what a module refuses with a ValueError or was not offered."""
    if row is None:
        return ""
    if row["verdict"] == "breaks":
        return "**NaN**" if row["error"] == "inf" else f"**{row['error']:.0e}**"
    if row["verdict"] == "raises":
        return "refuses" if row["note"].startswith("ValueError") else "**raises**"
    return {"holds": "✓", "not offered": "–"}[row["verdict"]]


# --- the papers' numbers beside ours ---------------------------------------------------------------------------------


def tables_as_published(*tables: str) -> str:
    """Every published number of some tables, without and with competition: a row for each column."""
    backbones = {"RetNet": "retnet", "GLA": "gla", "GDN": "gated-deltanet"}
    rows = []
    for table in tables:
        own = load(table)
        (whole,) = (row.published or [] for row in own.rows if row.at == {"mixer": "transformer"})
        for column, number in zip(own.columns, whole, strict=True):
            if number is not None:
                pairs = (paper(table, backbone, column) for backbone in backbones.values())
                rows.append([table.replace("-", " "), column, f"{number:g}", *pairs])
    return "\n".join(markdown(["", "", "Transformer++", *backbones], rows))


def recurrences() -> str:
    """Every mixer of the zoo without gates over heads as S_t = A_t S_{t−1} + k_tᵀ b_t."""
    columns = "A_t", "b_t", "features", "state", "can"
    rows = []
    for name in (name for name in zoo.names() if zoo.plain(zoo.get(name)) == zoo.get(name)):
        row = catalog.describe(name)
        rows.append([f"[`{name}`]({row['paper']})", *(catalog.cell(row[column]) for column in columns)])
    return "\n".join(markdown(["mixer", "A_t", "b_t", "φ of q and k", "S, or what is kept", "can"], rows))


# --- pages -----------------------------------------------------------------------------------------------------------
MADE: dict[str, Callable[..., str]] = SENTENCES | {
    one.__name__: one
    for one in (
        study, effects, others, published, starts, program, negatives, searched, defaults, figures, needles, speed,
        losses, benchmark, server, prefix_cache, speculation, beams, verified, study_if_kept, published_text,
        tables_as_published, recurrences, released_needles,
    )
}  # fmt: skip


def filled(page: str) -> str:
    return parts.filled(page, "research", lambda name, arguments, before: MADE[name](*arguments))


def pages() -> list[Path]:
    return parts.pages("research", ["docs", "research/docs"])


if __name__ == "__main__":
    sys.path.append(str(ROOT / "benchmarks"))
    for path in pages():
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
