"""The plans that come with headrace: a default for each task, the demo, and the suites of the leaderboard."""

from dataclasses import replace
from typing import Any

from .. import tasks
from .model import ArmRecipe, Shape
from .plan import Plan, Study, Tuning

PAIR = Plan(
    "pair",
    (
        "retnet(heads.expand_v=1)",
        "softmax-retnet(heads.expand_v=1)",
        "retnet(heads.expand_v=1, competition=sigmoid)",
        "retnet(heads.expand_v=1, heads.count=2)",
    ),
    tasks.Pair(),
)
COPY = Plan(
    "copy",
    ("transformer", "retnet", "softmax-retnet", "gated-deltanet", "softmax-gated-deltanet"),
    tasks.Copy(length=32),
    Shape(layers=2, heads=4),
    ArmRecipe(steps=1500, batch_size=32, lr=3e-3),
)
KEY_VALUE = replace(COPY, name="key-value", task=tasks.KeyValue(keys=16, pairs=4, length=24))
# The default vocabulary of Mqar is Zoology's 8,192, with which nothing is learnt within these steps.
MQAR = replace(
    COPY, name="mqar", task=tasks.Mqar(vocabulary=40, pairs=4, length=16), recipe=ArmRecipe(steps=1200, lr=3e-3)
)
SELECTIVE_COPY = replace(
    COPY,
    name="selective-copy",
    mixers=("mamba", *COPY.mixers),
    task=tasks.SelectiveCopy(symbols=8, copied=4, length=24),
    recipe=replace(COPY.recipe, steps=1000),
)
INDUCTION = replace(COPY, name="induction", task=tasks.Induction(length=32), recipe=replace(COPY.recipe, steps=600))
# With its own step sizes, up to 0.1, Gated DeltaNet has forgotten the number by the end of the row.
NEEDLE = Plan(
    "needle",
    (
        "transformer",
        "gated-deltanet(decay.dt_min=1e-5, decay.dt_max=1e-3)",
        "softmax-gated-deltanet(decay.dt_min=1e-5, decay.dt_max=1e-3)",
    ),
    tasks.Needle(length=512),
    Shape(hidden_size=128, layers=2, heads=4, mlp=128),
    ArmRecipe(steps=2000, batch_size=8, lr=1e-3, held_out=128),
    seeds=1,
)
DIGITS = Plan(
    "digits",
    ("gla", "softmax-gla", "bert(mixer=gla)", "bert(mixer=softmax-gla)", "transformer"),
    tasks.Digits(),
    Shape(layers=2, heads=4),
    ArmRecipe(steps=1000, lr=1e-2, held_out=359),
)
TEXT = Plan(
    "text",
    ("gla", "softmax-gla", "transformer"),
    tasks.Text(length=96),
    Shape(layers=2, mlp=128),
    ArmRecipe(steps=1000, batch_size=16, lr=6e-3, held_out=256),
    seeds=2,
)
MASKED = Plan(
    "masked",
    ("bert", "bert(mixer=gla)", "bert(mixer=softmax-gla)"),
    tasks.Masked(length=64),
    Shape(layers=2, heads=4),
    ArmRecipe(steps=2000, batch_size=32, lr=3e-3, held_out=256),
    seeds=2,
)
REVERSE = Plan(
    "reverse",
    ("rnn", "luong", "bahdanau", "transformer-2017", "t5", "transformer", "gated-deltanet"),
    tasks.Reverse(),
    Shape(layers=2, heads=4),
    ArmRecipe(steps=1500, lr=3e-3),
)
DATES = replace(REVERSE, name="dates", task=tasks.Dates(), recipe=ArmRecipe(steps=1200, lr=1e-2))
SPANS = replace(
    MASKED,
    name="spans",
    mixers=("t5", "t5(mixer=gla)", "t5(mixer=softmax-gla)"),
    task=tasks.Spans(length=64),
    recipe=replace(MASKED.recipe, steps=1500),
)
# One layer, and permutations that are swaps: what one reflection per token can do (arXiv 2411.12537).
PARITY = Plan(
    "parity",
    ("transformer", "gla", "deltanet", "negative-deltanet", "negative-gated-deltanet"),
    tasks.Parity(),
    Shape(layers=1, heads=4),
    ArmRecipe(steps=600, lr=3e-3),
)
# A rotation is two reflections, one in each layer.
MODULAR_COUNTING = replace(
    PARITY,
    name="modular-counting",
    mixers=("gla", "negative-deltanet", "negative-gated-deltanet"),
    task=tasks.ModularCounting(modulus=3),
    shape=Shape(layers=2, heads=4),
    recipe=ArmRecipe(steps=1000, lr=3e-3),
)
S3 = replace(PARITY, name="s3", task=tasks.S3(moved=2), recipe=replace(PARITY.recipe, lr=1e-2))
S5 = replace(PARITY, name="s5", task=tasks.S5(moved=2), recipe=replace(PARITY.recipe, lr=1e-2))
FLIP_FLOP = replace(S3, name="flip-flop", task=tasks.FlipFlop(length=32))
DYCK = replace(S3, name="dyck", task=tasks.Dyck(length=32))
PLANS = (
    PAIR, KEY_VALUE, MQAR, COPY, SELECTIVE_COPY, INDUCTION, NEEDLE, DIGITS, TEXT, MASKED, REVERSE, DATES, SPANS,
    PARITY, MODULAR_COUNTING, S3, S5, FLIP_FLOP, DYCK,
)  # fmt: skip
DEFAULTS: dict[str, Plan] = {plan.task.name: plan for plan in PLANS}
# The settings and the learning rate of research/studies/capacity-linear-attention.yaml, with which all arms converge.
CAPACITY = Plan(
    "pair",
    (
        "linear-attention",
        "softmax-linear-attention",
        "linear-attention(competition=sigmoid)",
        "softmax-linear-attention(competition.write=none)",
    ),
    tasks.Pair(keys=48, pairs=32, least=4),
    Shape(hidden_size=32, heads=4),
    ArmRecipe(steps=1500, batch_size=32, evaluations=15),
)
DEMO = Study("demo", "Does head competition help?", (CAPACITY, replace(TEXT, recipe=replace(TEXT.recipe, steps=300))))

# --- suites: lists of plans that every mixer runs by itself, so that its row stands beside those of others -----------
REFERENCE = "transformer"  # every model of a suite has as many parameters as this one's
TRACKING = Plan(
    "tracking",
    (REFERENCE,),
    tasks.Parity(length=32),
    Shape(layers=1, heads=4, mlp=128),
    ArmRecipe(steps=400, batch_size=32, evaluations=3),
    seeds=5,
    tuning=Tuning("lr", (3e-3, 6e-3, 1.2e-2), (5,)),
    reference=REFERENCE,
)
RECALL = replace(TRACKING, shape=Shape(layers=2, heads=4, mlp=128), tuning=Tuning("lr", (1.5e-3, 3e-3, 6e-3), (5,)))


def plan(base: Plan, name: str, task: tasks.Task, **recipe: Any) -> Plan:
    return replace(base, name=name, task=task, recipe=replace(base.recipe, **recipe))


SMALL = (
    plan(TRACKING, "parity", tasks.Parity(length=32)),
    plan(TRACKING, "s3", tasks.S3(length=16), steps=500),
    # Permutations that move three points at most are products of two reflections; all 120 are not learnt in this time.
    plan(TRACKING, "s5", tasks.S5(length=8, moved=3), steps=1000, batch_size=64),
    plan(TRACKING, "flip-flop", tasks.FlipFlop(length=32)),
    plan(TRACKING, "dyck", tasks.Dyck(length=32)),
    plan(RECALL, "mqar", tasks.Mqar(vocabulary=72, pairs=4, length=16), steps=600, batch_size=64),
    plan(RECALL, "selective-copy", tasks.SelectiveCopy(symbols=8, copied=4, length=24)),
    plan(RECALL, "needle", tasks.Induction(length=32), steps=600),
    plan(RECALL, "text", tasks.Text(length=64), batch_size=16),
)
SUITES: dict[str, tuple[Plan, ...]] = {"small": SMALL}
