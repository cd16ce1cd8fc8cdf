"""The default plan of each task, and the demo study."""

from dataclasses import replace

from .. import tasks
from .plan import ArmRecipe, Plan, Shape, Study

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
