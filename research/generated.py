"""What pages take from the rows of studies: the text that a function NAME of this module returns.

Pages here, and the README and pages of the library, keep it in parts `<!-- research: NAME ARGUMENT ... -->`
(docs/parts.py): `python -m research.generated` writes them, research/tests/test_generated.py compares. A number in a
sentence is such a part, so that the sentence around it can be edited freely.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from myst_parser.slugs import github_slugify

from benchmarks.record import markdown
from benchmarks.record import read as read_csv
from docs import parts
from headrace import zoo
from headrace.comparison import hypotheses
from headrace.comparison.defaults import DEFAULTS
from headrace.comparison.rows import Row, read
from headrace.report import catalog, stats
from headrace.report.differences import Difference
from headrace.training import machine
from headrace.verification.foreign import LAWS

from . import RESULTS, linear, power, rates, specialization
from . import study as studies
from .reproduce.experiment import load

ROOT = Path(__file__).parents[1]
VERIFIED = ROOT / "benchmarks" / "results" / "verify"
LAB_BOOK = "https://github.com/headrace/headrace/blob/main/research/docs/log.md"
BACKBONES = tuple(f"capacity-{name}" for name in ("linear-attention", "retnet", "gla", "deltanet", "gated-deltanet"))
TEXTS, REPEATS = ("text-gla", "text-retnet", "text-gated-deltanet"), ("text-repeats-gla", "text-repeats-gated-deltanet")
GROUPS: dict[str, tuple[str, ...]] = {
    "backbones": (*BACKBONES, "gates-retnet"),
    "four-times": ("capacity-large", "capacity-large-rates"), "two-distractors": ("distractors", "distractors-rates"),
    "published-linear": ("published-linear-attention", "published-linear-attention-rates"),
    "texts": TEXTS, "repeats": REPEATS, "all-texts": TEXTS + REPEATS,
    "settings": (
        "capacity-linear-attention", "capacity-retnet", "long-retnet", "retrofit", "capacity-gla", "capacity-deltanet",
        "capacity-gated-deltanet", "heads-retnet", "heads-norm", "heads-32", "clusters", "capacity-large",
        "capacity-large-rates", "overwritten", "distractors", "distractors-rates",
    ),
}  # fmt: skip
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


# --- blocks: what programs of this folder print ----------------------------------------------------------------------
def names(given: tuple[str, ...]) -> list[str]:
    """Studies, where a group stands for its own."""
    return [name for one in given for name in GROUPS.get(one, (one,))]


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
    name, backbone, form = power.PUBLISHED
    if not studies.kept(name).exists():
        return (
            "The published form has not been trained on text, so that nothing here judges the paper's gain. The plan "
            f"is `research/studies/{name}.yaml`."
        )
    verdict = "excludes" if power.Judged(*power.PUBLISHED).excluded else "does not exclude"
    arms = studies.by_arm(name)[power.WHERE]
    none, ungated, default = (
        stated(studies.effect(arms, form, other), 3) for other in ("none", "published without read gate", "softmax")
    )
    return (
        f"GLA in the published form less none is {none} nats a token, which {verdict} the paper's gain of "
        f"{power.published_gain(backbone):.3f}; less the same form without its read gate it is {ungated}, less the "
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


# --- numbers of studies ----------------------------------------------------------------------------------------------
def stated(mean: stats.Mean, digits: int, more: str = "") -> str:
    """A mean as sentences have it: +mean (low to high…), with a true minus."""
    low, high = mean.interval
    return minus(f"{mean.value:+.{digits}f} ({low:.{digits}f} to {high:.{digits}f}{more})")


def minus(text: str) -> str:
    return text.replace("-", "−")


def p_value(p: float) -> str:
    return minus(f"p {p:.2g}".replace("p 0.", "p ."))


@cache
def differences(name: str) -> dict[tuple[str, str], Difference]:
    """{(a, b): the difference of two arms} of a study with one place, corrected over the study."""
    asked, runs = studies.read(name)
    (found,) = hypotheses.differences([(asked, runs)])
    return {(one.a, one.b): one for one in found}


def digits(name: str) -> int:
    return hypotheses.UNITS[studies.read(name)[0].measure].digits


def gain(name: str, a: str, b: str, place: str = "") -> str:
    """A less b over the seeds of a study. place: of a study with several."""
    arms = studies.by_arm(name)[place] if place else studies.only(studies.by_arm(name))
    return stated(studies.effect(arms, a, b), digits(name))


def corrected(name: str, a: str, b: str) -> str:
    """p of a less b, by Holm over the differences of the study."""
    return p_value(differences(name)[a, b].corrected)


def imitating(column: str, a: str, b: str) -> str:
    """A less b in nats per token, or in relative squared error, of models with linear layers."""
    run, family = next((r, f) for r in linear.RUNS for f in linear.RUNS[r].families if (a, b) in f.pairs)
    found = {(one.where, one.a, one.b): one for one in linear.differences(read_csv(linear.kept(run)), family)}
    one = found[column, a, b]
    return stated(one.mean, linear.LOSS.digits, f"; {p_value(one.corrected)} by Holm")


def pooled(a: str, b: str, group: str, place: str | None = None) -> str:
    """A less b over the seeds of several studies; a seed is the mean over those that have it."""
    own = names((group,))
    mean, p = studies.pooled(a, b, own, place)
    return stated(mean, digits(own[0]), f"; {mean.n} seeds, {p_value(p)}")


def by_run(a: str, b: str, group: str, place: str) -> str:
    """A less b over the runs of several studies, as if runs of one seed were independent."""
    arms = (studies.by_arm(name)[place] for name in names((group,)))
    gains = [gain for own in arms for gain in (own[a] - own[b]).dropna()]
    return stated(stats.mean_over_seeds(gains), digits(names((group,))[0]), f"; {len(gains)} pairs of runs")


def holds(name: str, arm: str) -> str:
    """The pairs that an arm holds, or the steps that it needs: the mean over seeds."""
    mean = studies.only(studies.by_arm(name))[arm].mean()
    return f"{2**mean / studies.positions(name) if studies.read(name)[0].measure == 'capacity' else mean:.0f}"


def scores(name: str) -> dict[str, list[float]]:
    """{arm: 100 times the score of every reported run}"""
    asked, runs = studies.read(name)
    found: dict[str, list[float]] = {}
    for row in (row for row in runs if not row["trial"]):
        found.setdefault(asked.name(row["mixer"]), []).append(100 * row["score"])
    return found


def score(name: str, arm: str) -> str:
    return f"{fmean(scores(name)[arm]):.1f} %"


def points(name: str, a: str, b: str) -> str:
    return paired_points(scores(name)[a], scores(name)[b])


def paired_points(a: list[float], b: list[float]) -> str:
    gains = [x - y for x, y in zip(a, b, strict=True)]
    return f"{stated(stats.mean_over_seeds(gains), 1)} points"


def converged(name: str) -> str:
    return studies.converged(name)


def start(value: str, arm: str) -> str:
    """An arm with first weights of the gates of this standard deviation, less the same with zeros."""
    places = studies.by_arm("gate-start")
    zeros, own = (places[f"pair-gate_std-{std}"][arm] for std in ("0", value))
    return stated(stats.mean_over_seeds((own - zeros).tolist()), 2)


def ablation(width: str, mixer: str) -> str:
    """The information between heads and the clusters that lose recall without them."""
    (line,) = (line for line in specialization.lines() if line.startswith(f"| {width} | {mixer} |"))
    return line.split(" | ")[5]


def settings() -> str:
    """How many settings the table of effects has."""
    return str(len(studies.settings(names(("settings",)))))


def remaining() -> str:
    """How many differences of the studies of the table of effects remain after Holm's correction over all of them."""
    found = hypotheses.differences([studies.read(name) for name in GROUPS["settings"]])
    return WORDS[sum(one.verdict != "not told apart" for own in found for one in own)]


def sooner() -> str:
    """The fewest and the most steps that the softmax saves a backbone other than linear attention."""
    saved = sorted(
        -one.mean.value
        for (a, b), one in differences("speed").items()
        if b.endswith("none") and not a.startswith("linear-attention")
    )
    return f"{saved[0]:.0f} to {saved[-1]:.0f}"


def missed() -> str:
    """In how many seeds some arm did not reach a recall of 90 %, at most."""
    _, runs = studies.read("speed")
    own = [row for row in runs if not row["trial"] and row["reached"] is None]
    mixers = [row["mixer"] for row in own]
    return WORDS[max(map(mixers.count, mixers))]


# --- the demo --------------------------------------------------------------------------------------------------------
@cache
def demonstrated() -> dict[str, list[float]]:
    """{mixer: recall in % by seed} of the demo on rows of pairs."""
    found: dict[str, list[float]] = {}
    for row in read(RESULTS / "studies" / "demo.csv"):
        if not row["trial"] and row["comparison"] == "pair":
            found.setdefault(row["mixer"], []).append(100 * row["score"])
    return found


def demo(mixer: str) -> str:
    own = demonstrated()[mixer]
    return f"{fmean(own):.1f} ± {stdev(own):.1f} %"


def demo_gain(a: str, b: str) -> str:
    return paired_points(demonstrated()[a], demonstrated()[b])


# --- learning rates and defaults -------------------------------------------------------------------------------------
RATES = ("3e-4", "1e-3", "3e-3", "1e-2", "3e-2")


def rate(recipe: str, mixer: str, tokens: str, step: str, lr: str) -> str:
    """The held-out loss of a recipe at a learning rate."""
    return f"{rates.losses()[recipe, mixer, int(tokens), int(step)][float(lr)]:.3f}"


@cache
def default_runs() -> list[Row]:
    return read(RESULTS / "defaults.csv")


def shown(run: Row) -> str:
    """A score, with a star where the run had not converged."""
    value = f"{run['score']:.3f} nats" if run["metric"] == "loss" else f"{100 * run['score']:.1f}"
    return value + ("" if run["converged"] else "*")


def reached(task: str, mixer: str) -> str:
    """The score of a mixer with the default of a task, at seed 0."""
    (run,) = (run for run in default_runs() if (run["comparison"], run["mixer"]) == (task, mixer))
    return f"{100 * run['score']:.1f} %"


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
MEASURED = {"held-out loss": "{:.3f}", "WikiText ppl": "{:,.0f}", "bits per byte": "{:.3f}"}


def reproduced(*experiments: str) -> dict[str, dict[str, list[float]]]:
    """{model: {metric: the value of each seed}} of reproductions at laptop scale, some of which share models."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in (row for name in experiments for row in read_csv(RESULTS / "reproduce" / f"{name}.csv")):
        model, _, seed = row["run"].rpartition("-")
        found.setdefault(model, {}).setdefault(row["metric"], {})[seed] = float(row["value"])
    return {model: {metric: list(own.values()) for metric, own in by.items()} for model, by in found.items()}


def figures(*experiments: str) -> str:
    """Means over seeds and their 95 % intervals; below them the gains of competition, paired by seed."""
    found = reproduced(*experiments)
    gains = {
        f"`{arm}` less `{competing}`": {
            m: [a - b for a, b in zip(found[arm][m], found[competing][m], strict=True)] for m in MEASURED
        }
        for competing in found
        if "softmax-" in competing and (arm := competing.replace("softmax-", ""))
    }
    rows = ({f"`{arm}`": own for arm, own in found.items()} | gains).items()
    cells = ([first, *(interval(own[m], form) for m, form in MEASURED.items())] for first, own in rows)
    return "\n".join(markdown(["models", *MEASURED], cells, ["---", *["--:"] * len(MEASURED)]))


def interval(values: list[float], form: str) -> str:
    mean = stats.mean_over_seeds(values)
    return f"{form.format(mean.value)} ± {form.format(mean.reach)}"


def needles(experiment: str) -> str:
    """The needles that the model of each seed found, %, by length."""
    lengths = {"320": "320 tokens", "640": "640", "1K": "1,024"}
    rows = (
        [f"`{arm}`", *(", ".join(f"{value:.0f}" for value in own[f"S-NIAH-1 {length}"]) for length in lengths)]
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
def paper(table: str, backbone: str, column: str) -> str:
    """A published number without and with competition."""
    own, at = load(table), list(load(table).columns).index(column)
    numbers = {row.at["mixer"]: row.published[at] for row in own.rows if row.published}
    digits = 1 if table == "table-3" else 2
    return " → ".join(f"{numbers[form]:.{digits}f}" for form in (backbone, f"paper-softmax-{backbone}"))


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


def state(mixer: str) -> str:
    """The numbers that a layer of the catalog's size keeps."""
    return f"{catalog.describe(mixer)['numbers']:,}"


def needle(backbone: str) -> str:
    """The needles that the models of both seeds found at 1,024 tokens, %, without and with competition."""
    found = reproduced("table-3")
    forms = (found[f"needle-{form}{backbone}"]["S-NIAH-1 1K"] for form in ("", "softmax-"))
    return " → ".join(", ".join(f"{value:.0f}" for value in own) for own in forms)


def curve(arm: str, competing: str) -> str:
    """What competition gains in held-out loss at laptop scale, paired by seed."""
    found = reproduced("figure-2", "figure-1")
    losses = (found[model]["held-out loss"] for model in (arm, competing))
    return interval([a - b for a, b in zip(*losses, strict=True)], MEASURED["held-out loss"])


def gpu_cost(backbone: str) -> str:
    """The share of the training speed on a GPU that competition takes."""
    speed = {mixer: float(row["tokens_per_second"]) for mixer, row in machine.measured().items()}
    return f"{100 * (1 - speed[f'softmax-{backbone}'] / speed[backbone]):.1f} %"


def recurrences() -> str:
    """Every mixer of the zoo without gates over heads as S_t = A_t S_{t−1} + k_tᵀ b_t."""
    columns = "A_t", "b_t", "features", "state", "can"
    rows = []
    for name in (name for name in zoo.names() if zoo.plain(zoo.get(name)) == zoo.get(name)):
        row = catalog.describe(name)
        rows.append([f"[`{name}`]({row['paper']})", *(catalog.cell(row[column]) for column in columns)])
    return "\n".join(markdown(["mixer", "A_t", "b_t", "φ of q and k", "S, or what is kept", "can"], rows))


# --- pages -----------------------------------------------------------------------------------------------------------
MADE: dict[str, Callable[..., str]] = {
    one.__name__: one
    for one in (
        study, effects, others, published, starts, program, negatives, gain, corrected, imitating, pooled, by_run,
        holds, score, points, converged, start, ablation, settings, remaining, sooner, missed, demo, demo_gain, rate,
        searched, defaults, figures, needles, speed, losses, benchmark, server, prefix_cache, speculation, beams,
        verified, study_if_kept, published_text, reached, paper, tables_as_published, state, needle, curve, gpu_cost,
        recurrences, released_needles,
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
