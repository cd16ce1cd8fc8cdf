"""What a comparison shows, in sentences, negative results included. Every sentence follows from the results by a rule,
and a number in it that varies with the seed has its spread: a standard deviation (±) or a 95 % interval.
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import takewhile

from ... import zoo
from ...spec.linear import CACHED, to_json
from . import many_mixers
from .failures import at_chance, failures
from .pairwise import Difference, as_control, common_seeds, competing, find, pairs, without_count
from .summary import Comparison, Contender, count, show_contender, show_scores

LATE = 0.02
HELD = 0.9  # a score that holds at a length
EVEN = 0.95  # gates of at least this part of the largest entropy hardly choose
SPELT = 2  # so many pairs are told one by one; more are counted


def answer(comparison: Comparison) -> str:
    """The main result as a clause: competition against its backbones or, without any, the best against the second."""
    differences, ranked = pairs(comparison), comparison.finished
    if not ranked:
        return "no model has a score"
    if len(differences) > SPELT:
        return many_mixers.tally(differences)
    if differences:
        return "; ".join(map(str, differences))
    if len(ranked) == 1 or not common_seeds(*ranked[:2]):
        return f"{ranked[0].label} reaches {show_contender(ranked[0])}"
    return f"of {len(ranked)} mixers {ranked[0].label} has the highest score: {Difference(*ranked[:2])}"


def headline(comparisons: list[Comparison]) -> str:
    """One sentence on everything that was compared."""
    if len(comparisons) == 1:
        return f"Held-out {comparisons[0].metric.name}: {answer(comparisons[0])}."
    clauses = (f"on {c.plan['name']} ({c.metric.name}), {answer(c)}" for c in comparisons)
    return f"{'; '.join(clauses)}.".replace("on", "On", 1)


def findings(comparison: Comparison) -> list[str]:
    """Sentences, the most important first."""
    rules = RULES_OF_MANY if comparison.many else RULES
    return [sentence for rule in rules for sentence in rule(comparison)] if comparison.finished else []


def differences(comparison: Comparison) -> Iterator[str]:
    """Those that the answer only counts."""
    if len(found := pairs(comparison)) > SPELT:
        yield from (f"{sentence[0].upper()}{sentence[1:]}." for sentence in map(str, found))


def controls(comparison: Comparison) -> Iterator[str]:
    """Is it competition, or would gates that do not compete have done as well?"""
    for c in competing(comparison):
        base, control = find(comparison, zoo.plain(c.spec)), find(comparison, as_control(c.spec))
        if base and control and common_seeds(c, base, control):
            yield (
                f"Gates without competition ({control.label}, sigmoid): {Difference(control, base)}; "
                f"{Difference(c, control)}."
            )


def fewer_heads(comparison: Comparison) -> Iterator[str]:
    """At a fixed width, fewer heads without competition may do as well."""
    default = comparison.plan["shape"]["heads"]
    for c in competing(comparison):
        for plain in comparison.finished:
            fewer = plain.spec.num_heads(default) < c.spec.num_heads(default)
            same = without_count(plain.spec) == without_count(zoo.plain(c.spec))
            if fewer and same and common_seeds(c, plain):
                yield (
                    f"Fewer heads without competition: {Difference(plain, c)}. At a fixed width fewer heads have a "
                    f"larger state ({plain.constant('state_bytes'):,} against {c.constant('state_bytes'):,} bytes)."
                )


def ranking(comparison: Comparison) -> Iterator[str]:
    ranked = comparison.finished
    if len({str(to_json(without_count(zoo.plain(c.spec)))) for c in ranked}) > 1:
        yield f"By mean score: {', '.join(f'{c.label} {show_contender(c)}' for c in ranked)}."


def caches(comparison: Comparison) -> Iterator[str]:
    cached = [c for c in comparison.finished_in_order if isinstance(c.spec, CACHED)]
    if cached and len(cached) < len(comparison.finished):
        sizes = ", ".join(f"{c.label} {c.constant('state_bytes'):,} bytes" for c in cached)
        yield f"A cache of keys and values grows with every token; at the end of a row: {sizes}."


def lengths(comparison: Comparison) -> Iterator[str]:
    """How far each one's score holds as rows or sources get longer."""
    longest = comparison.plan["length"]
    for c in comparison.contenders:
        if not c.by_length:
            continue
        means = {n: statistics.fmean(scores) for n, scores in sorted(c.by_length.items())}
        held = list(takewhile(lambda n, means=means: means[n] >= HELD, means))  # type: ignore[misc]
        name, seeds = c.metric.name, count(len(c.by_length[longest]), "seed")
        reach = f"at least {HELD:.0%} up to length {held[-1]}" if held else f"below {HELD:.0%} at length {min(means)}"
        beyond = ", longer than any in training" if held and held[-1] > longest else ""
        yield (
            f"{c.label}: mean {name} ({seeds}) is {reach}{beyond}; at {longest}, the longest in training, it is "
            f"{show_scores(c.metric, c.by_length[longest])}."
        )


def alignments(comparison: Comparison) -> Iterator[str]:
    for contender in comparison.contenders:
        if found := contender.alignment:
            read = [found["source"][max(range(len(row)), key=row.__getitem__)] for row in found["weights"]]
            steps = list(zip(read, found["target"], strict=True))[:-1]  # the last one is the end
            hits = sum(a == b for a, b in steps)
            yield (
                f"In the one row whose alignment is drawn, {contender.label} reads most of the character that it "
                f"writes in {hits} of {count(len(steps), 'step')}."
            )


def gate_entropy(comparison: Comparison) -> Iterator[str]:
    for c in comparison.gated:
        ends = {gate: final_entropy(c, gate) for gate in ("write", "read")}
        ends = {gate: values for gate, values in ends.items() if values}
        if not ends:
            continue
        said = " and ".join(f"{gate} gates {spread(values)}" for gate, values in ends.items())
        even = min(map(statistics.fmean, ends.values())) >= EVEN
        yield (
            f"Final entropy of {c.label}, as a part of its largest value: {said}"
            f"{': the heads are used almost evenly' if even else ''}."
        )
        if sinks := sum(has_sink(arm) for arm in c.arms):
            yield (
                f"In {sinks} of {count(len(c.arms), 'seed')} of {c.label} one head takes most of what is written at "
                "positions with a question, and at most an even share elsewhere."
            )


def final_entropy(contender: Contender, gate: str) -> list[float]:
    """Of each seed, the mean over layers."""
    by_seed = [[g["entropy"] for g in arm["curve"][-1]["gates"] if g["gate"] == gate] for arm in contender.arms]
    return [statistics.fmean(values) for values in by_seed if values]


def spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f} (one seed)"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


def has_sink(arm: dict) -> bool:
    for gate in arm["curve"][-1]["gates"]:
        if gate["gate"] == "write" and gate["load_asked"] and gate["load_other"]:
            pairs = zip(gate["load_asked"], gate["load_other"], strict=True)
            if any(asked > 0.5 and other <= 1 / len(gate["load"]) for asked, other in pairs):
                return True
    return False


def gate_parameters(comparison: Comparison) -> Iterator[str]:
    if found := pairs(comparison):
        shares = {d.a.label: d.a.constant("gate_parameters") / d.b.constant("parameters") for d in found}
        most = max(shares, key=shares.__getitem__)
        yield f"Gates add at most {shares[most]:.1%} to a model's parameters ({most})."


def cautions(comparison: Comparison) -> Iterator[str]:
    for contender in comparison.contenders:
        for idle in contender.spec.idle_gates(comparison.plan["shape"]["heads"]):
            yield f"A gate of {contender.label} hardly acts: {idle}."
        if lost := [arm["seed"] for arm in contender.arms if arm["diverged"]]:
            yield f"{contender.label} diverged in seed {', '.join(map(str, lost))}: its loss is no number there."
    if learning := [c.label for c in comparison.finished if still_learning(c)]:
        who = f"{len(learning)} of {len(comparison.finished)}" if comparison.many else ", ".join(learning)
        yield f"Still learning when training ended: {who}. More steps would change the figures."
    recipe, arm = comparison.plan["recipe"], comparison.contenders[0].arms[0]
    tokens = recipe["steps"] * recipe["batch_size"] * comparison.plan["length"]
    yield (
        f"All of this is at {arm['parameters'] / 1e6:.2g} M parameters and {tokens / 1e6:.2g} M tokens; "
        "it says nothing about larger models."
    )


def still_learning(contender: Contender) -> bool:
    """Whether the last stretch between evaluations gave more than LATE of all that was learnt."""
    means = [mean for _, mean, _, _ in contender.curve()]
    return len(means) > 2 and abs(means[-1] - means[-2]) > LATE * abs(means[-1] - means[0])


Rule = Callable[[Comparison], Iterator[str]]
RULES: tuple[Rule, ...] = (
    failures, differences, controls, fewer_heads, ranking, lengths, gate_entropy, alignments, caches, gate_parameters,
    cautions,
)  # fmt: skip
RULES_OF_MANY: tuple[Rule, ...] = (at_chance, many_mixers.best_and_last, differences, gate_parameters, cautions)
