"""The numbers that sentences of pages have, each the text that a function returns; `research.generated` writes them."""

from collections.abc import Callable
from functools import cache
from statistics import fmean, stdev

from benchmarks.record import read as read_csv
from headrace.comparison import hypotheses
from headrace.comparison.rows import Row, read
from headrace.report import catalog, stats
from headrace.report.differences import Difference
from headrace.training import machine

from . import RESULTS, linear, rates, specialization
from . import study as studies
from .reproduce.experiment import load

BACKBONES = tuple(f"capacity-{name}" for name in ("linear-attention", "retnet", "gla", "deltanet", "gated-deltanet"))
TEXTS, REPEATS = ("text-gla", "text-retnet", "text-gated-deltanet"), ("text-repeats-gla", "text-repeats-gated-deltanet")
GROUPS: dict[str, tuple[str, ...]] = {
    "backbones": BACKBONES,
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
BySeed = dict[str | int, float]
MEASURED = {"held-out loss": "{:.3f}", "WikiText ppl": "{:,.0f}", "bits per byte": "{:.3f}"}


# --- studies ----------------------------------------------------------------------------------------------------------
def names(given: tuple[str, ...]) -> list[str]:
    """Studies, where a group stands for its own."""
    return [name for one in given for name in GROUPS.get(one, (one,))]


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


def imitating(column: str, a: str, b: str, run: str = "") -> str:
    """A less b in nats per token, or in relative squared error, of models with linear layers. run: of linear.RUNS; by
    default the first that has the pair."""
    run, family = next(
        (r, f) for r in ([run] if run else linear.RUNS) for f in linear.RUNS[r].families if (a, b) in f.pairs
    )
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
    won = [gain for own in arms for gain in (own[a] - own[b]).dropna()]
    return stated(stats.mean_over_seeds(won), digits(names((group,))[0]), f"; {len(won)} pairs of runs")


def holds(name: str, arm: str) -> str:
    """The pairs that an arm holds, or the steps that it needs: the mean over seeds."""
    mean = studies.only(studies.by_arm(name))[arm].mean()
    return f"{2**mean / studies.positions(name) if studies.read(name)[0].measure == 'capacity' else mean:.0f}"


def scores(name: str) -> dict[str, BySeed]:
    """{arm: 100 times the score of every reported run}"""
    asked, runs = studies.read(name)
    found: dict[str, BySeed] = {}
    for row in (row for row in runs if not row["trial"]):
        found.setdefault(asked.name(row["mixer"]), {})[row["seed"]] = 100 * row["score"]
    return found


def score(name: str, arm: str) -> str:
    return f"{fmean(scores(name)[arm].values()):.1f} %"


def points(name: str, a: str, b: str) -> str:
    return paired_points(scores(name)[a], scores(name)[b])


def paired_points(a: BySeed, b: BySeed) -> str:
    return f"{stated(stats.mean_over_seeds(gains(a, b)), 1)} points"


def gains(a: BySeed, b: BySeed) -> list[float]:
    """a − b of each seed."""
    if a.keys() != b.keys():
        raise ValueError(f"seeds {list(a)} cannot be paired with {list(b)}; expected the same")
    return [a[seed] - b[seed] for seed in a]


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


# --- the demo ---------------------------------------------------------------------------------------------------------
@cache
def demonstrated() -> dict[str, BySeed]:
    """{mixer: recall in %} of the demo on rows of pairs."""
    found: dict[str, BySeed] = {}
    for row in read(RESULTS / "studies" / "demo.csv"):
        if not row["trial"] and row["comparison"] == "pair":
            found.setdefault(row["mixer"], {})[row["seed"]] = 100 * row["score"]
    return found


def demo(mixer: str) -> str:
    own = list(demonstrated()[mixer].values())
    return f"{fmean(own):.1f} ± {stdev(own):.1f} %"


def demo_gain(a: str, b: str) -> str:
    return paired_points(demonstrated()[a], demonstrated()[b])


# --- learning rates and defaults --------------------------------------------------------------------------------------
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


# --- reproductions ----------------------------------------------------------------------------------------------------
def reproduced(*experiments: str) -> dict[str, dict[str, BySeed]]:
    """{model: {metric: values}} of reproductions at laptop scale, some of which share models."""
    found: dict[str, dict[str, BySeed]] = {}
    for row in (row for name in experiments for row in read_csv(RESULTS / "reproduce" / f"{name}.csv")):
        model, _, seed = row["run"].rpartition("-")
        found.setdefault(model, {}).setdefault(row["metric"], {})[seed] = float(row["value"])
    return found


def interval(values: list[float], form: str) -> str:
    mean = stats.mean_over_seeds(values)
    return f"{form.format(mean.value)} ± {form.format(mean.reach)}"


# --- the papers' numbers beside ours ----------------------------------------------------------------------------------
def paper(table: str, backbone: str, column: str) -> str:
    """A published number without and with competition."""
    own, at = load(table), list(load(table).columns).index(column)
    numbers = {row.at["mixer"]: row.published[at] for row in own.rows if row.published}
    digits = 1 if table == "table-3" else 2
    return " → ".join(f"{numbers[form]:.{digits}f}" for form in (backbone, f"paper-softmax-{backbone}"))


def state(mixer: str) -> str:
    """The numbers that a layer of the catalog's size keeps."""
    return f"{catalog.describe(mixer)['numbers']:,}"


def needle(backbone: str) -> str:
    """The needles that the models of both seeds found at 1,024 tokens, %, without and with competition."""
    found = reproduced("table-3")
    forms = (found[f"needle-{form}{backbone}"]["S-NIAH-1 1K"] for form in ("", "softmax-"))
    return " → ".join(", ".join(f"{value:.0f}" for value in own.values()) for own in forms)


def curve(arm: str, competing: str) -> str:
    """What competition gains in held-out loss at laptop scale, paired by seed."""
    found = reproduced("figure-2", "figure-1")
    losses = (found[model]["held-out loss"] for model in (arm, competing))
    return interval(gains(*losses), MEASURED["held-out loss"])


def gpu_cost(backbone: str) -> str:
    """The share of the training speed on a GPU that competition takes."""
    measured = machine.read_rows(machine.MEASURED, "mixer")
    speed = {mixer: float(row["tokens_per_second"]) for mixer, row in measured.items()}
    return f"{100 * (1 - speed[f'softmax-{backbone}'] / speed[backbone]):.1f} %"


MADE: dict[str, Callable[..., str]] = {
    one.__name__: one
    for one in (
        gain, corrected, imitating, pooled, by_run, holds, score, points, converged, start, ablation, settings,
        remaining, sooner, missed, demo, demo_gain, rate, reached, paper, state, needle, curve, gpu_cost,
    )
}  # fmt: skip
