"""The findings of a comparison as sentences, negative results included.

Each sentence follows from the results by a fixed rule. A number that varies with the seed is given with its standard
deviation over seeds (±) or with a 95 % interval.
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import takewhile

from ... import zoo
from ...report.numbers import count
from ...spec.serialise import CACHED, to_json
from .failures import at_chance, failures
from .pairwise import Difference, as_control, common_seeds, competing, find, pairs, without_count
from .rows import HELD, RULE, converged
from .summary import Comparison, Contender, show_contender, show_scores

EVEN = 0.95  # gate entropy over log(heads) from which on the heads count as used evenly
SPELT = 2  # largest number of pairs that the answer names one by one


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
    return f"of {len(ranked)} mixers, {ranked[0].label} has the best mean score: {Difference(*ranked[:2])}"


def headline(comparisons: list[Comparison]) -> str:
    """The main results of all comparisons of a study in one sentence."""
    if len(comparisons) == 1:
        return f"Held-out {comparisons[0].metric.name}: {answer(comparisons[0])}."
    clauses = (f"on {c.plan['name']} ({c.metric.name}), {answer(c)}" for c in comparisons)
    return f"{'; '.join(clauses)}.".replace("on", "On", 1)


def findings(comparison: Comparison, planned: bool = False) -> list[str]:
    """Sentences on one comparison, the most important first; empty if no mixer has a score.

    planned: whether a plan names the differences to be tested, so that none is judged here."""
    rules = RULES_OF_MANY if comparison.many else RULES
    rules = tuple(rule for rule in rules if not (planned and rule in JUDGING))
    return [sentence for rule in rules for sentence in rule(comparison)] if comparison.finished else []


def differences(comparison: Comparison) -> Iterator[str]:
    """The differences between mixers and their backbones that the answer counts but does not name."""
    if len(found := pairs(comparison)) > SPELT:
        yield from (f"{sentence[0].upper()}{sentence[1:]}." for sentence in map(str, found))


def controls(comparison: Comparison) -> Iterator[str]:
    """Compares softmax gates with sigmoid gates, which have the same parameters but do not compete."""
    for c in competing(comparison):
        base, control = find(comparison, zoo.plain(c.spec)), find(comparison, as_control(c.spec))
        if base and control and common_seeds(c, base, control):
            yield (
                f"Control with sigmoid gates, which do not compete: {Difference(control, base)}; "
                f"{Difference(c, control)}."
            )


def fewer_heads(comparison: Comparison) -> Iterator[str]:
    """Compares competing heads with a backbone of fewer heads, which has a larger state at the same width."""
    default = comparison.plan["shape"]["heads"]
    for c in competing(comparison):
        for plain in comparison.finished:
            fewer = plain.spec.num_heads(default) < c.spec.num_heads(default)
            same = without_count(plain.spec) == without_count(zoo.plain(c.spec))
            if fewer and same and common_seeds(c, plain):
                yield (
                    f"Control with fewer heads and no competition: {Difference(plain, c)}. At a fixed width, fewer "
                    f"heads have a larger state ({plain.constant('state_bytes'):,} against "
                    f"{c.constant('state_bytes'):,} bytes)."
                )


def ranking(comparison: Comparison) -> Iterator[str]:
    ranked = comparison.finished
    if len({str(to_json(without_count(zoo.plain(c.spec)))) for c in ranked}) > 1:
        yield f"Mean scores, best first: {', '.join(f'{c.label} {show_contender(c)}' for c in ranked)}."


def caches(comparison: Comparison) -> Iterator[str]:
    cached = [c for c in comparison.finished_in_order if isinstance(c.spec, CACHED)]
    if cached and len(cached) < len(comparison.finished):
        sizes = ", ".join(f"{c.label} {c.constant('state_bytes'):,} bytes" for c in cached)
        yield f"A key-value cache grows with every token; its size at the end of a row: {sizes}."


def lengths(comparison: Comparison) -> Iterator[str]:
    """The length of row or source up to which the score of each mixer stays at HELD or above."""
    longest = comparison.plan["length"]
    for c in comparison.contenders:
        if not c.by_length:
            continue
        means = {n: statistics.fmean(scores) for n, scores in sorted(c.by_length.items())}
        held = list(takewhile(lambda n, means=means: means[n] >= HELD, means))  # type: ignore[misc]
        name, seeds = c.metric.name, count(len(c.by_length[longest]), "seed")
        reach = f"at least {HELD:.0%} up to length {held[-1]}" if held else f"below {HELD:.0%} at length {min(means)}"
        beyond = ", which is longer than any in training" if held and held[-1] > longest else ""
        yield (
            f"{c.label}: the mean {name} over {seeds} is {reach}{beyond}; at length {longest}, the longest in "
            f"training, it is {show_scores(c.metric, c.by_length[longest])}."
        )


def alignments(comparison: Comparison) -> Iterator[str]:
    for contender in comparison.contenders:
        if found := contender.alignment:
            read = [found["source"][max(range(len(row)), key=row.__getitem__)] for row in found["weights"]]
            steps = list(zip(read, found["target"], strict=True))[:-1]  # the last target is the end token
            hits = sum(a == b for a, b in steps)
            yield (
                f"In the one row whose alignment is drawn, {contender.label} gives the largest weight to the source "
                f"character that it writes at {hits} of {count(len(steps), 'step')}."
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
            f"Final gate entropy of {c.label}, divided by log(heads): {said}"
            f"{'; the heads are used almost evenly' if even else ''}."
        )
        if sinks := sum(has_sink(arm) for arm in c.arms):
            yield (
                f"In {sinks} of {count(len(c.arms), 'seed')} of {c.label}, one head takes more than half of the write "
                "gate at query positions and at most an even share (1/heads) at all others."
            )


def final_entropy(contender: Contender, gate: str) -> list[float]:
    """Final entropy of a gate for each seed, as the mean over layers."""
    by_seed = [[g["entropy"] for g in arm["curve"][-1]["gates"] if g["gate"] == gate] for arm in contender.arms]
    return [statistics.fmean(values) for values in by_seed if values]


def spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f} (one seed)"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


def has_sink(arm: dict) -> bool:
    """Whether a head takes more than half of a write gate at query positions and at most an even share elsewhere."""
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
        yield f"Gates add at most {shares[most]:.1%} to the number of parameters ({most})."


def cautions(comparison: Comparison) -> Iterator[str]:
    for contender in comparison.contenders:
        for idle in contender.spec.idle_gates(comparison.plan["shape"]["heads"]):
            yield f"A gate of {contender.label} has little or no effect: {idle}."
        if lost := [arm["seed"] for arm in contender.arms if arm["diverged"]]:
            yield f"{contender.label} diverged with seed {', '.join(map(str, lost))}: its loss is not finite."
    if learning := [c for c in comparison.finished if not all(map(converged, c.arms))]:
        runs = [
            f"{c.label} in {sum(not converged(a) for a in c.arms)} of {count(len(c.arms), 'seed')}" for c in learning
        ]
        who = f"{len(learning)} of {len(comparison.finished)} mixers" if comparison.many else ", ".join(runs)
        yield f"Not converged: {who}; more steps would change the scores ({RULE})."
    recipe, arm = comparison.plan["recipe"], comparison.contenders[0].arms[0]
    tokens = recipe["steps"] * recipe["batch_size"] * comparison.plan["length"]
    yield (
        f"These results hold for {arm['parameters'] / 1e6:.2g} M parameters and {tokens / 1e6:.2g} M training tokens; "
        "they say nothing about larger models."
    )


def tally(differences: list[Difference]) -> str:
    """The number of backbones that competition makes better, makes worse or leaves without a clear difference."""
    n = len(differences)
    if max(len(d.gains) for d in differences) == 1:
        ahead = sum(d.mean > 0 for d in differences)
        return f"competition is ahead for {ahead} of {count(n, 'backbone')}, in one seed, which is too few to judge"
    kinds = {"better": [d.b for d in differences if d.better], "worse": [d.b for d in differences if d.worse]}
    said = [f"{len(found)} {kind} ({', '.join(c.label for c in found)})" for kind, found in kinds.items() if found]
    even = n - sum(map(len, kinds.values()))
    said += [f"{even} without a clear difference"] if even else []
    return f"effect of competition on {count(n, 'backbone')}: {'; '.join(said)}, each judged by its 95 % interval"


def best_and_worst(comparison: Comparison) -> Iterator[str]:
    ranked = comparison.finished
    best, last = (", ".join(f"{c.label} {show_contender(c)}" for c in part) for part in (ranked[:3], ranked[-3:]))
    yield f"Best mean scores of {len(ranked)} mixers: {best}; worst: {last}."


Rule = Callable[[Comparison], Iterator[str]]
RULES: tuple[Rule, ...] = (
    failures, differences, controls, fewer_heads, ranking, lengths, gate_entropy, alignments, caches, gate_parameters,
    cautions,
)  # fmt: skip
JUDGING: tuple[Rule, ...] = (differences, controls, fewer_heads)
RULES_OF_MANY: tuple[Rule, ...] = (at_chance, best_and_worst, differences, gate_parameters, cautions)
