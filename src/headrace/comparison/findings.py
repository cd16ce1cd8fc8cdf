"""The findings of a comparison as sentences, negative results included.

Each sentence follows from the results by a fixed rule and says what no table of the report says. A number that varies
with the seed is given with its standard deviation over seeds (±) or with a 95 % interval.
"""

from collections.abc import Callable, Iterator, Sequence

from ..extra.specs.matrix import MatrixSpec
from ..report.differences import Difference, answer
from ..report.numbers import count
from ..spec.linear import MixerSpec
from ..training.gate_statistics import failures
from .rows import RULE, converged
from .shape import MATCHED
from .summary import Comparison, shared_settings, show, show_contender, task_of

NEAR = 0.02  # a score counts as chance up to this much above it
QUANTITIES = {  # field -> (name, format of a value)
    "parameters": ("parameters", "{:,}"),
    "state": ("state sizes", "{:,} numbers"),
    "flops": ("FLOPs of a forward pass", "{:,} per row"),
}


# --- the answer ------------------------------------------------------------------------------------------------------
def headline(comparisons: Sequence[Comparison], tests: Sequence[Sequence[Difference]]) -> str:
    """The main results in one sentence: mixers with competing heads against their backbones or, in a comparison without
    such a pair, its first difference. tests: of `pairwise.judged`."""
    main = [[one for one in own if one.kind == "backbone"] or own[:1] for own in tests]
    judged = [one for own in main for one in own]
    places = [f"{c.plan['name']}: " * (len(comparisons) > 1) for c in comparisons]
    alone = [place + reached(c) for place, c, own in zip(places, comparisons, main, strict=True) if not own]
    metrics = dict.fromkeys(c.metric.name for c in comparisons)
    return f"Held-out {', '.join(metrics)}: {'; '.join(filter(None, (answer(judged), *alone)))}."


def reached(comparison: Comparison) -> str:
    ranked = comparison.finished
    return f"{ranked[0].label} reaches {show_contender(ranked[0])}" if ranked else "no model has a score"


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
RULES: tuple[Rule, ...] = (at_chance, choices, diverged, unlabelled, cautions)
RULES_OF_MANY: tuple[Rule, ...] = (at_chance, diverged, unlabelled, cautions)
