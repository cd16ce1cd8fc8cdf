"""What a comparison found, negative results included: the differences that are judged, as one family, and findings as
sentences.

Each sentence follows from the results by a fixed rule and says what no table of the report says. A number that varies
with the seed is given with its standard deviation over seeds (±) or with a 95 % interval.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from statistics import fmean
from typing import Any

from .. import zoo
from ..extra.specs.matrix import MatrixSpec
from ..report import differences as report
from ..report.differences import Difference, Unit
from ..report.numbers import count, significant
from ..spec.attention import AttentionSpec
from ..spec.linear import MixerSpec
from ..spec.serialize import Spec
from ..tasks import Metric
from ..training.gate_statistics import failures
from .plan import MATCHED
from .rows import RULE, converged
from .summary import Comparison, Contender, Sweep, shared_settings, show, show_contender, task_of

EASY = "both solve the task"
# Gates of controls: of the range of the softmax, and of the earlier default, which results of older versions have.
SIGMOIDS: tuple[dict[str, Any], ...] = ({"activation": "sigmoid"}, {"activation": "sigmoid", "range": 2.0})
NEAR = 0.02  # a score counts as chance up to this much above it
QUANTITIES = {  # field -> (name, format of a value)
    "parameters": ("parameters", "{:,}"),
    "state": ("state sizes", "{:,} numbers"),
    "flops": ("FLOPs of a forward pass", "{:,} per row"),
}


# --- differences -----------------------------------------------------------------------------------------------------
def judged(comparisons: Sequence[Comparison]) -> list[list[Difference]]:
    """Returns the differences of each comparison of a report, corrected over those of all comparisons that can have a
    verdict. Mixers that were chosen by their scores count as all pairs from which they were chosen."""
    found = [differences(comparison) for comparison in comparisons]
    others = sum(unseen(c) for c, own in zip(comparisons, found, strict=True) if own and own[0].kind == "best")
    return report.judged(found, others)


def unseen(comparison: Comparison) -> int:
    """The number of pairs that could have a verdict, without that of the two best mixers."""
    return sum(between(*pair).undecided is None for pair in [*combinations(comparison.finished, 2)][1:])


def differences(comparison: Comparison) -> list[Difference]:
    """The differences of the mixers that belong together; without any, of the best mixer and the second best."""
    where, ranked = comparison.plan["name"], comparison.finished
    pairs = {(a.mixer, b.mixer): between(a, b, kind, where) for a, b, kind in related(comparison)}
    found = [one for one in pairs.values() if one.mean.n]
    if found or len(ranked) < 2:
        return found
    whole = sum(not c.lost for c in ranked)
    among = f"{whole} that never diverged" if 0 < whole < len(ranked) else len(ranked)
    best = between(ranked[0], ranked[1], "best", where)
    return [replace(best, a=f"{best.a} (best of {among})")] if best.mean.n else []


def related(comparison: Comparison) -> Iterator[tuple[Contender, Contender, str]]:
    """Two mixers that belong together, and why:

    backbone: a mixer with competing heads, and its backbone.
    control: a mixer with sigmoid gates, which have the same parameters but do not compete, and its backbone; the
        softmax gates, and the sigmoid gates.
    heads: a backbone of fewer heads, which has a larger state at the same width, and the competing heads.
    """
    by_spec = {c.spec: c for c in comparison.finished[::-1]}
    sizes = comparison.plan["shape"]["hidden_size"], comparison.plan["shape"]["heads"]
    for c in competing(comparison):
        if base := by_spec.get(zoo.plain(c.spec)):
            yield c, base, "backbone"
    for c, gates in product(competing(comparison), SIGMOIDS):
        base, control = by_spec.get(zoo.plain(c.spec)), by_spec.get(with_gates(c.spec, **gates))
        if base and control:
            yield from ((control, base, "control"), (c, control, "control"))
    for c, plain in product(competing(comparison), comparison.finished):
        fewer = plain.spec.num_heads(*sizes) < c.spec.num_heads(*sizes)
        if fewer and without_count(plain.spec) == without_count(zoo.plain(c.spec)):
            yield plain, c, "heads"


def between(a: Contender, b: Contender, kind: str = "backbone", where: str = "") -> Difference:
    """The gain of mixer a over mixer b, above 0 if a is better, over the seeds in which neither diverged. Both train on
    the same rows for a seed, so scores are paired by seed.

    kind: that of `related`, or "best" of two that do not belong together."""
    metric, seeds = a.metric, [seed for seed in a.by_seed if seed in b.by_seed]
    sign = 1 if metric.higher_is_better else -1
    gains = [sign * (a.by_seed[seed] - b.by_seed[seed]) for seed in seeds]
    common = [[c.by_seed[seed] for seed in seeds] for c in (a, b)]
    solved = bool(seeds) and metric.solved is not None and min(map(fmean, common)) >= metric.solved
    easy = {"undecided": EASY} if solved else {}
    lost = len({*a.lost, *b.lost})
    return report.over_seeds(a.label, b.label, gains, unit(metric), where=where, kind=kind, lost=lost, **easy)


def unit(metric: Metric) -> Unit:
    name = "points" if metric.unit == "%" else metric.unit
    return Unit(name, name, metric.digits, metric.scale)


def competing(comparison: Comparison) -> list[Contender]:
    """Finished mixers whose heads compete; those with sigmoid or shuffled gates are controls and left out."""
    alone = ({"activation": "sigmoid"}, {"shuffle": True})
    controls = lambda spec: (zoo.plain(spec), *(with_gates(spec, **gates) for gates in alone))  # noqa: E731
    return [c for c in comparison.finished_in_order if c.spec not in controls(c.spec)]


def with_gates(spec: Spec, **changes: Any) -> Spec:
    """The spec with changes of the fields of every competition."""

    def changed(mixer: MixerSpec) -> MixerSpec:
        gate = mixer.competition
        return mixer if gate is None else replace(mixer, competition=replace(gate, **changes))

    return zoo.each_mixer(spec, changed)


def without_count(spec: Spec) -> Spec:
    """The spec with its own number of heads unset."""
    if isinstance(spec, MixerSpec):
        return replace(spec, heads=replace(spec.heads, count=None))
    return replace(spec, count=None) if isinstance(spec, AttentionSpec) else spec


# --- the answer ------------------------------------------------------------------------------------------------------
def headline(comparisons: Sequence[Comparison], tests: Sequence[Sequence[Difference]]) -> str:
    """The main results in one sentence: mixers with competing heads against their backbones or, in a comparison without
    such a pair, its first difference. tests: of `judged`."""
    main = [one for own in tests for one in ([x for x in own if x.kind == "backbone"] or own[:1])]
    alone = []
    for comparison in (c for c, own in zip(comparisons, tests, strict=True) if not own):
        best = next((f"{c.label} reaches {show_contender(c)}" for c in comparison.finished), "no model has a score")
        alone.append(f"{comparison.plan['name']}: {best}" if len(comparisons) > 1 else best)
    metrics = dict.fromkeys(c.metric.name for c in comparisons)
    return f"Held-out {', '.join(metrics)}: {'; '.join(filter(None, (report.answer(main), *alone)))}."


def findings(comparison: Comparison) -> list[str]:
    """Sentences on one comparison, the most important first; empty if no mixer has a score. None judges a difference,
    which `judged` does."""
    rules = RULES_OF_MANY if comparison.many else RULES
    return [sentence for rule in rules for sentence in rule(comparison)] if comparison.finished else []


# --- what is matched -------------------------------------------------------------------------------------------------
def conditions(comparison: Comparison) -> list[str]:
    """Sentences on the quantities of several models that are matched (within a factor MATCHED), on those that are not,
    on shared settings, and on mixers with their own number of heads."""
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
    unsettled = ((c, sum(not (arm["diverged"] or converged(arm)) for arm in c.arms)) for c in comparison.finished)
    if learning := [(c, n) for c, n in unsettled if n]:
        each = ", ".join(f"{c.label} in {n} of {count(len(c.arms), 'seed')}" for c, n in learning)
        who = f"{len(learning)} of {len(comparison.finished)} mixers" if comparison.many else each
        yield f"Not converged: {who}; more steps would change the scores ({RULE})."
    recipe, arm = comparison.plan["recipe"], comparison.contenders[0].arms[0]
    tokens = recipe["steps"] * recipe["batch_size"] * comparison.plan["length"]
    yield (
        f"These results hold for {significant(arm['parameters'] / 1e6, 2)} M parameters and "
        f"{significant(tokens / 1e6, 2)} M training tokens; they say nothing about larger models."
    )


Rule = Callable[[Comparison], Iterator[str]]
RULES: tuple[Rule, ...] = (at_chance, choices, diverged, unlabelled, cautions)
RULES_OF_MANY: tuple[Rule, ...] = (at_chance, diverged, unlabelled, cautions)


def of_sweep(sweep: Sweep) -> list[str]:
    """The failures at each value of a sweep."""
    return [
        f"At {sweep.field}={value}: {sentence}"
        for value, comparison in zip(sweep.values, sweep.comparisons, strict=True)
        for sentence in (*at_chance(comparison), *diverged(comparison))
    ]
