"""The findings of a comparison as sentences, negative results included.

Each sentence follows from the results by a fixed rule and says what no table of the report says. A number that varies
with the seed is given with its standard deviation over seeds (±) or with a 95 % interval.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from statistics import fmean

from ..report.numbers import count
from ..spec.linear import MixerSpec
from ..spec.matrix import MatrixSpec
from ..training.gate_statistics import failures
from .pairwise import BETTER, VERDICTS, WORSE, Difference
from .rows import HELD, RULE, converged
from .shape import MATCHED
from .summary import Comparison, Contender, shared_settings, show, show_contender, show_scores, task_of

SPELT = 2  # largest number of pairs that the answer names one by one
NEAR = 0.02  # a score counts as chance up to this much above it
QUANTITIES = {  # field -> (name, format of a value)
    "parameters": ("parameters", "{:,}"),
    "state": ("state sizes", "{:,} numbers"),
    "flops": ("FLOPs of a forward pass", "{:,} per row"),
}


# --- the answer ------------------------------------------------------------------------------------------------------
def headline(comparisons: Sequence[Comparison], tests: Sequence[Sequence[Difference]]) -> str:
    """The main results of all comparisons of a study in one sentence. tests: of `pairwise.judged`."""
    if len(comparisons) == 1:
        return f"Held-out {comparisons[0].metric.name}: {answer(comparisons[0], tests[0])}."
    both = zip(comparisons, tests, strict=True)
    clauses = (f"on {c.plan['name']} ({c.metric.name}), {answer(c, own)}" for c, own in both)
    return f"{'; '.join(clauses)}.".replace("on", "On", 1)


def answer(comparison: Comparison, tests: Sequence[Difference]) -> str:
    """The main result as a clause: mixers with competing heads against their backbones or, without such a pair, the
    best mixer against the second best."""
    ranked, differences = comparison.finished, [one for one in tests if one.kind == "backbone"]
    if not ranked:
        return "no model has a score"
    if len(differences) > SPELT:
        return tally(differences)
    if differences:
        return "; ".join(map(str, differences))
    if not tests:
        return f"{ranked[0].label} reaches {show_contender(ranked[0])}"
    whole = sum(not c.lost for c in ranked)
    among = f"{count(whole, 'mixer')} that never diverged" if 0 < whole < len(ranked) else f"{len(ranked)} mixers"
    return f"of {among}, {ranked[0].named} has the best mean score; {tests[0]}"


def tally(differences: Sequence[Difference]) -> str:
    """The number of mixers with competition by their verdict against their backbones."""
    found = {verdict: [d.a.label for d in differences if d.verdict == verdict] for verdict in VERDICTS}
    parts = [
        f"{len(labels)} {verdict}" + (f" ({', '.join(labels)})" if verdict in (BETTER, WORSE) else "")
        for verdict, labels in found.items()
        if labels
    ]
    return f"{len(differences)} mixers with competition against their backbones: {'; '.join(parts)}"


def findings(comparison: Comparison) -> list[str]:
    """Sentences on one comparison, the most important first; empty if no mixer has a score. None judges a difference,
    which `pairwise.judged` does."""
    rules = RULES_OF_MANY if comparison.many else RULES
    return [sentence for rule in rules for sentence in rule(comparison)] if comparison.finished else []


# --- what is matched -------------------------------------------------------------------------------------------------
def conditions(comparison: Comparison) -> list[str]:
    """One sentence on the quantities that are matched (within a factor MATCHED) and one on those that are not; empty
    for a single model."""
    matched, unmatched = [], []
    for field, (name, form) in QUANTITIES.items():
        found = {c.label: c.state if field == "state" else c.constant(field) for c in comparison.contenders}
        sizes = {label: size for label, size in found.items() if size is not None}
        if len(sizes) < 2:
            continue
        small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        low, high = sizes[small], sizes[large]
        if high <= MATCHED * low:
            matched.append(f"{name} (within {high / low - 1:.1%})" if low else f"{name} (all zero)")
        else:
            ratio = f"differ by up to {high / low:.2f}×" if low else "differ"
            unmatched.append(f"{name} {ratio} ({small} {form.format(low)}, {large} {form.format(high)})")
    if uncounted := [c.label for c in comparison.contenders if c.constant("flops") is None]:
        unmatched.append(f"FLOPs are not counted for {', '.join(uncounted)}")
    said = [f"Matched: {', '.join(matched)}."] if matched else []
    said += [f"Not matched: {'; '.join(unmatched)}."] if unmatched else []
    shared = shared_settings([c.mixer for c in comparison.contenders])
    said += [f"All mixers have {', '.join(shared)}, which their names here leave out."] if shared else []
    return said + own_heads(comparison)


def own_heads(comparison: Comparison) -> list[str]:
    """A sentence on the mixers whose published sizes give them another number of heads than the plan's."""
    D, H = (comparison.plan["shape"][name] for name in ("hidden_size", "heads"))
    sized = [
        c for c in comparison.contenders if isinstance(c.spec, MixerSpec | MatrixSpec) and "heads.count=" not in c.mixer
    ]
    own = {c.label: c.spec.num_heads(D, H) for c in sized}
    named = ", ".join(f"{label} {heads}" for label, heads in own.items() if heads != H)
    return [f"Heads: {H}, or by the head sizes of a mixer's paper: {named}."] if named else []


# --- rules -----------------------------------------------------------------------------------------------------------
def at_chance(comparison: Comparison) -> Iterator[str]:
    chance = getattr(task_of(comparison.plan["task"]), "chance", None)
    lost = [c for c in comparison.finished if chance is not None and c.mean <= chance + NEAR]
    if chance is not None and lost:
        who = ", ".join(f"{c.label} {show_contender(c)}" for c in lost)
        yield f"At chance, no more than {100 * NEAR:.0f} points above {show(comparison.metric, chance)}: {who}."


def choices(comparison: Comparison) -> Iterator[str]:
    """Gates that one head takes nearly alone, heads that take nearly nothing, and gates that choose nothing."""
    for c in comparison.gated:
        ends = [gate for arm in c.arms for gate in arm["curve"][-1]["gates"]]
        found = [failures(gate["entropy"], gate["load"]) for gate in ends]
        heads = count(sum(len(gate["load"]) for gate in ends), "head")
        if one := sum(each.collapsed is not None for each in found):
            yield f"Collapsed gates: {one} of {count(len(ends), 'gate')} of {c.label}."
        if dead := sum(len(each.dead) for each in found):
            yield f"Dead heads: {dead} of {heads} of {c.label}."
        if even := sum(each.uniform for each in found):
            yield f"Uniform gates: {even} of {count(len(ends), 'gate')} of {c.label}."


def lengths(comparison: Comparison) -> Iterator[str]:
    """How the score of each mixer depends on the length of row or source."""
    longest = comparison.plan["length"]
    for c in (c for c in comparison.contenders if c.by_length):
        said = reach if c.metric.higher_is_better else beyond
        yield f"{c.named}: {said(c, longest)}."


def reach(c: Contender, longest: int) -> str:
    """The length up to which the score stays at HELD or above."""
    means = {n: fmean(scores) for n, scores in sorted(c.by_length.items())}
    held = list(takewhile(lambda n: means[n] >= HELD, means))
    name, seeds = c.metric.name, count(len(c.by_length[longest]), "seed")
    where = f"at least {HELD:.0%} up to length {held[-1]}" if held else f"below {HELD:.0%} at length {min(means)}"
    longer = ", which is longer than any in training" if held and held[-1] > longest else ""
    return (
        f"the mean {name} over {seeds} is {where}{longer}; at length {longest}, the longest in training, it is "
        f"{show_scores(c.metric, c.by_length[longest])}"
    )


def beyond(c: Contender, longest: int) -> str:
    """The loss in the longest rows beside that in rows as long as in training."""
    last = max(c.by_length)
    trained, tested = (show_scores(c.metric, c.by_length[n]) for n in (longest, last))
    return f"the {c.metric.name} is {trained} in rows of {longest}, as in training, and {tested} in rows of {last}"


def diverged(comparison: Comparison) -> Iterator[str]:
    for c in comparison.contenders:
        if c.lost:
            yield f"{c.label} diverged with seed {', '.join(map(str, c.lost))}: its loss is not finite."


def unlabelled(comparison: Comparison) -> Iterator[str]:
    """The training batches in which no token had a label, whose loss and gradients are 0."""
    for c in comparison.contenders:
        if number := sum(arm.get("batches_without_labels", 0) for arm in c.arms):
            yield f"Batches without any label in training {c.label}: {number:,}; their loss and gradients were 0."


def cautions(comparison: Comparison) -> Iterator[str]:
    sizes = comparison.plan["shape"]["hidden_size"], comparison.plan["shape"]["heads"]
    for contender in comparison.contenders:
        for idle in contender.spec.idle_gates(*sizes):
            yield f"A gate of {contender.label} has little or no effect: {idle}."
    if learning := [(c, n) for c in comparison.finished if (n := sum(not converged(arm) for arm in c.arms))]:
        each = ", ".join(f"{c.label} in {n} of {count(len(c.arms), 'seed')}" for c, n in learning)
        who = f"{len(learning)} of {len(comparison.finished)} mixers" if comparison.many else each
        yield f"Not converged: {who}; more steps would change the scores ({RULE})."
    recipe, arm = comparison.plan["recipe"], comparison.contenders[0].arms[0]
    tokens = recipe["steps"] * recipe["batch_size"] * comparison.plan["length"]
    yield (
        f"These results hold for {arm['parameters'] / 1e6:.2g} M parameters and {tokens / 1e6:.2g} M training tokens; "
        "they say nothing about larger models."
    )


Rule = Callable[[Comparison], Iterator[str]]
RULES: tuple[Rule, ...] = (
    at_chance,
    choices,
    lengths,
    diverged,
    unlabelled,
    cautions,
)
RULES_OF_MANY: tuple[Rule, ...] = (at_chance, diverged, unlabelled, cautions)
