"""What a comparison showed, in plain words, negatives included. Every sentence follows from results by a rule."""

from collections.abc import Callable, Iterator

from .. import zoo
from ..model_spec import ModelSpec
from ..spec import CACHED
from .crowd import best_and_last, range_of_costs, tally
from .duels import Difference, as_control, common_seeds, competing, count, find, gated, pairs, without_count
from .failures import at_chance, failures
from .summary import Comparison, Contender, show, show_contender

MATCHED = 0.01  # parameters within this part of each other are matched
LATE = 0.02
HELD = 0.9  # a score that holds at a length
EVEN = 0.95  # gates of at least this part of the largest entropy hardly choose


def words(comparison: Comparison) -> list[str]:
    """Sentences, the most important first."""
    if not comparison.finished:
        return ["No arm of this comparison has a score."]
    rules = CROWD_RULES if comparison.crowded else RULES
    return [sentence for rule in rules for sentence in rule(comparison)]


def duels(comparison: Comparison) -> Iterator[str]:
    for winner, base in pairs(comparison):
        difference = Difference(winner, base)
        yield (
            f"{winner.label} {show_contender(winner)} against {base.label} {show_contender(base)} "
            f"over {count(len(difference.gains), 'seed')}: {difference.verdict()}."
        )


def controls(comparison: Comparison) -> Iterator[str]:
    """Is it competition, or would gates that do not compete have done as well?"""
    for winner in competing(comparison):
        base = find(comparison, zoo.plain(winner.spec))
        control = find(comparison, as_control(winner.spec))
        if not (base and control and common_seeds(winner, base, control)):
            continue
        reached = f"The sigmoid control ({control.label}: gates without competition) reaches {show_contender(control)}"
        gain, rest = Difference(winner, base), Difference(winner, control)
        if not gain.better:
            yield f"{reached}: against {base.label}, {Difference(control, base).verdict()}."
            continue
        share = Difference(control, base).mean / gain.mean
        against = "" if rest.clear else f" (softmax against sigmoid: {rest.verdict()})"
        yield f"{reached}: {attribution(share)}{against}."


def attribution(share: float) -> str:
    """What the control's part of the gain says about the rest."""
    if share >= 1:
        return "the gain is gating; competition adds nothing to it here"
    if share >= 0.5:
        return "most of the gain is gating, not competition"
    if share >= 0.2:
        return f"gating alone gives {share:.0%} of the gain, so most of it is competition"
    return "gating alone gives little of the gain: it is competition"


def fewer_heads(comparison: Comparison) -> Iterator[str]:
    """At a fixed width, fewer heads without competition may do as well."""
    default = comparison.plan["shape"]["heads"]
    for winner in competing(comparison):
        H = winner.spec.num_heads(default)
        for plain in comparison.finished:
            h = plain.spec.num_heads(default)
            same = without_count(plain.spec) == without_count(zoo.plain(winner.spec))
            if h >= H or not same or not common_seeds(winner, plain):
                continue
            difference = Difference(plain, winner)
            against = "better than" if difference.better else "short of" if difference.worse else "as good as"
            yield (
                f"With {count(h, 'head')} the plain {plain.label.split(' (')[0]} reaches {show_contender(plain)}, "
                f"{against} {H} competing heads ({show_contender(winner)}): at fixed width fewer heads mean a larger "
                f"state ({plain.constant('state_bytes'):,} against {winner.constant('state_bytes'):,} bytes)."
            )


def ranking(comparison: Comparison) -> Iterator[str]:
    ranked = comparison.finished
    backbones = {without_count(zoo.plain(c.spec)) for c in ranked}
    if len(backbones) > 1:
        places = ", ".join(f"{c.label} {show(c.metric, c.mean)}" for c in ranked)
        yield f"In order of the mean: {places}."
    transformers = [c for c in ranked if isinstance(c.spec, CACHED)]
    others = [c for c in ranked if not isinstance(c.spec, (*CACHED, ModelSpec))]
    if transformers and others:
        cache, state = transformers[0].constant("state_bytes"), max(c.constant("state_bytes") for c in others)
        yield (
            f"The {transformers[0].label}'s cache of a row takes {cache:,} bytes and grows; "
            f"the others' states take at most {state:,} and do not."
        )


def lengths(comparison: Comparison) -> Iterator[str]:
    """How far each one's score holds as rows or sources get longer."""
    longest = comparison.plan["length"]
    for contender in comparison.contenders:
        held = [n for n, score in contender.by_length.items() if score >= HELD]
        if not contender.by_length:
            continue
        at, name = contender.by_length[longest], contender.metric.name
        reach = f"stays above {HELD:.0%} up to length {max(held)}" if held else f"is below {HELD:.0%} at every length"
        beyond = ", beyond what it was trained on" if held and max(held) > longest else ""
        yield f"{contender.label}: {name} {reach}{beyond}; at {longest}, the longest of training, it is {at:.0%}."


def alignments(comparison: Comparison) -> Iterator[str]:
    for contender in comparison.contenders:
        if found := contender.alignment:
            read = [found["source"][max(range(len(row)), key=row.__getitem__)] for row in found["weights"]]
            pairs = list(zip(read, found["target"], strict=True))[:-1]  # the last one is the end
            hits = sum(a == b for a, b in pairs)
            yield (
                f"In the alignment drawn, {contender.label} reads most of the character that it writes in {hits} "
                f"of {count(len(pairs), 'step')}."
            )


def what_gates_do(comparison: Comparison) -> Iterator[str]:
    for contender in gated(comparison):
        ends = {gate: contender.entropy(gate)[-1][1] for gate in ("write", "read") if contender.entropy(gate)}
        if not ends:
            continue
        said = " and ".join(f"its {gate} gates at {value:.2f}" for gate, value in ends.items())
        if min(ends.values()) >= EVEN:
            yield f"{contender.label} ends with {said} of the largest entropy: the heads are used almost evenly."
            continue
        write = [g for g in contender.gates if g["gate"] == "write"]
        busiest = max((max(g["load"]) for g in write), default=None)
        seed = contender.arms[0]["seed"]
        load = "" if busiest is None else f"; in seed {seed} one head takes {busiest:.0%} of the writes"
        yield f"{contender.label} ends with {said} of the largest entropy (1: all heads alike){load}."
        if sinks := sum(has_sink(arm) for arm in contender.arms):
            yield (
                f"In {sinks} of {count(len(contender.arms), 'seed')} of {contender.label} one head takes most of what "
                "the questions write and at most an even share of what is to be kept: a head to throw things away."
            )


def has_sink(arm: dict) -> bool:
    for gate in arm["curve"][-1]["gates"]:
        if gate["gate"] == "write" and gate["load_asked"] and gate["load_other"]:
            pairs = zip(gate["load_asked"], gate["load_other"], strict=True)
            if any(asked > 0.5 and other <= 1 / len(gate["load"]) for asked, other in pairs):
                return True
    return False


def costs(comparison: Comparison) -> Iterator[str]:
    for contender in competing(comparison):
        if base := find(comparison, zoo.plain(contender.spec)):
            added, slower = contender.constant("gate_parameters"), 1 - contender.speed / base.speed
            share = added / base.constant("parameters")
            time = f"cost {slower:.0%} of the tokens per second" if slower > 0.005 else "cost no measurable time"
            yield f"The gates of {contender.label} add {added:,} parameters ({share:.1%}) and {time} in training."


def cautions(comparison: Comparison) -> Iterator[str]:
    for contender in comparison.contenders:
        for idle in contender.spec.idle_gates(comparison.plan["shape"]["heads"]):
            yield f"A gate of {contender.label} hardly acts: {idle}."
        if lost := [arm["seed"] for arm in contender.arms if arm["diverged"]]:
            yield f"{contender.label} diverged in seed {', '.join(map(str, lost))}: its loss is no number there."
    sizes = {c.label: c.constant("parameters") - c.constant("gate_parameters") for c in comparison.contenders}
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if (apart := sizes[large] / sizes[small] - 1) > MATCHED:
        yield f"Not matched: {large} has {apart:.1%} more parameters than {small} (gates apart)."
    if learning := [c.label for c in comparison.finished if still_learning(c)]:
        who = f"{len(learning)} of {len(comparison.finished)}" if comparison.crowded else ", ".join(learning)
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
    failures, duels, controls, fewer_heads, ranking, lengths, alignments, what_gates_do, costs, cautions,
)  # fmt: skip
CROWD_RULES: tuple[Rule, ...] = (at_chance, tally, best_and_last, range_of_costs, cautions)
