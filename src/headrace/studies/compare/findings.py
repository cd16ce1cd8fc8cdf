"""The findings of a comparison as sentences, negative results included.

Each sentence follows from the results by a fixed rule and says what no table of the report says. A number that varies
with the seed is given with its standard deviation over seeds (±) or with a 95 % interval.
"""

from collections.abc import Callable, Iterator
from itertools import product, takewhile
from statistics import fmean
from typing import Any

from ... import zoo
from ...spec.linear import MixerSpec
from ...spec.matrix import MatrixSpec
from ..report.numbers import count
from ..stats import SEEDS
from .pairwise import Difference, common_seeds, competing, few, find, pairs, with_gates, without_count
from .rows import HELD, RULE, converged
from .shape import MATCHED
from .summary import Comparison, Contender, shared_settings, show, show_contender, show_scores, task_of

SPELT = 2  # largest number of pairs that the answer names one by one
NEAR = 0.02  # a score counts as chance up to this much above it
COLLAPSED = 0.9  # a gate is collapsed if one head has at least this mean share
EVEN = 0.95  # a gate is even if the mean entropy over heads is at least this part of its maximum
DEAD = 0.1  # a head is dead if its mean share is below this part of an even share
# Gates of controls: of the range of the softmax, and of the earlier default, which results of older versions have.
SIGMOIDS: tuple[dict[str, Any], ...] = ({"activation": "sigmoid"}, {"activation": "sigmoid", "range": 2.0})
QUANTITIES = {  # field -> (name, format of a value)
    "parameters": ("parameters", "{:,}"),
    "state": ("state sizes", "{:,} numbers"),
    "flops": ("FLOPs of a forward pass", "{:,} per row"),
}


# --- the answer ------------------------------------------------------------------------------------------------------
def headline(comparisons: list[Comparison]) -> str:
    """The main results of all comparisons of a study in one sentence."""
    if len(comparisons) == 1:
        return f"Held-out {comparisons[0].metric.name}: {answer(comparisons[0])}."
    clauses = (f"on {c.plan['name']} ({c.metric.name}), {answer(c)}" for c in comparisons)
    return f"{'; '.join(clauses)}.".replace("on", "On", 1)


def answer(comparison: Comparison) -> str:
    """The main result as a clause: softmax mixers against their backbones or, without such a pair, the best mixer
    against the second best."""
    differences, ranked = pairs(comparison), comparison.finished
    if not ranked:
        return "no model has a score"
    if len(differences) > SPELT:
        return tally(differences)
    if differences:
        return "; ".join(map(str, differences))
    if len(ranked) == 1 or not common_seeds(*ranked[:2]):
        return f"{ranked[0].label} reaches {show_contender(ranked[0])}"
    whole = sum(not c.lost for c in ranked)
    among = f"{count(whole, 'mixer')} that never diverged" if 0 < whole < len(ranked) else f"{len(ranked)} mixers"
    return f"of {among}, {ranked[0].named} has the best mean score: {Difference(*ranked[:2])}"


def tally(differences: list[Difference]) -> str:
    """The number of mixers that competition makes better, makes worse or leaves without a clear difference."""
    n = len(differences)
    if (most := max(d.gain.n for d in differences)) < SEEDS:
        ahead = sum(d.gain.value > 0 for d in differences)
        said = f"{ahead} of {n} mixers with competition are ahead of their backbones in {few(most)}"
        return f"{said}, which is too few to judge"
    kinds = {kind: [d.a.label for d in differences if d.verdict == kind] for kind in ("better", "worse")}
    parts = [f"{len(labels)} {kind} ({', '.join(labels)})" for kind, labels in kinds.items() if labels]
    even = n - sum(map(len, kinds.values()))
    parts += [f"{even} without a clear difference"] if even else []
    parts += (
        [f"{lost} over seeds in which neither diverged"] if (lost := sum(bool(d.lost) for d in differences)) else []
    )
    return f"{n} mixers with competition against their backbones: {'; '.join(parts)}, each judged by its 95 % interval"


def findings(comparison: Comparison, planned: bool = False) -> list[str]:
    """Sentences on one comparison, the most important first; empty if no mixer has a score.

    planned: whether a plan names the differences to be tested, so that none is judged here."""
    rules = RULES_OF_MANY if comparison.many else RULES
    rules = tuple(rule for rule in rules if not (planned and rule in JUDGING))
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
        shares = [share * len(gate["load"]) for gate in ends for share in gate["load"]]  # 1: an even share
        gates, heads = (f"{count(len(some), name)} of {c.label}" for some, name in ((ends, "gate"), (shares, "head")))
        if one := sum(max(gate["load"]) >= COLLAPSED for gate in ends):
            yield f"Collapsed gates: in {one} of {gates}, one head takes {COLLAPSED:.0%} or more."
        if dead := sum(share < DEAD for share in shares):
            yield f"Dead heads: {dead} of {heads} take less than {DEAD:.0%} of an even share."
        if even := sum(gate["entropy"] >= EVEN for gate in ends):
            yield f"Even gates: in {even} of {gates}, the entropy over heads is at least {EVEN:.0%} of its maximum."


def differences(comparison: Comparison) -> Iterator[str]:
    """The differences between mixers and their backbones that the answer counts but does not name."""
    if len(differences := pairs(comparison)) > SPELT:
        yield from (f"{sentence[0].upper()}{sentence[1:]}." for sentence in map(str, differences))


def controls(comparison: Comparison) -> Iterator[str]:
    """Compares softmax gates with sigmoid gates, which have the same parameters but do not compete."""
    for c, gates in product(competing(comparison), SIGMOIDS):
        base, control = find(comparison, zoo.plain(c.spec)), find(comparison, with_gates(c.spec, **gates))
        if base and control and common_seeds(c, base, control):
            yield (
                f"Control with sigmoid gates, which do not compete: {Difference(control, base)}; "
                f"{Difference(c, control)}."
            )


def fewer_heads(comparison: Comparison) -> Iterator[str]:
    """Compares competing heads with a backbone of fewer heads, which has a larger state at the same width."""
    sizes = comparison.plan["shape"]["hidden_size"], comparison.plan["shape"]["heads"]
    for c in competing(comparison):
        for plain in comparison.finished:
            fewer = plain.spec.num_heads(*sizes) < c.spec.num_heads(*sizes)
            same = without_count(plain.spec) == without_count(zoo.plain(c.spec))
            if fewer and same and common_seeds(c, plain):
                yield (
                    f"Control with fewer heads and no competition: {Difference(plain, c)}. At a fixed width, fewer "
                    f"heads have a larger state ({plain.state:,} against {c.state:,} numbers)."
                )


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
    differences,
    controls,
    fewer_heads,
    lengths,
    diverged,
    unlabelled,
    cautions,
)
JUDGING: tuple[Rule, ...] = (differences, controls, fewer_heads)
RULES_OF_MANY: tuple[Rule, ...] = (at_chance, differences, diverged, unlabelled, cautions)
