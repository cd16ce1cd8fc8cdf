"""The plans that come with headrace: a default for each task, the demo, and the suites of the leaderboard. They are
made as those of users' tasks are: what differs from the defaults of `Plan`, `Shape` and `ArmRecipe`."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from .. import tasks, zoo
from ..spec.record import Kind, checked
from ..spec.serialize import admitted
from ..tasks import Task
from ..utils.errors import InputError, did_you_mean
from .model import ArmRecipe, Shape
from .plan import Plan, Study, Tuning


def having(plan: Plan, values: dict[str, Any]) -> Plan:
    """The plan with new values of fields of its task, shape and recipe."""
    shape, recipe = ({k: v for k, v in values.items() if k in cls.__dataclass_fields__} for cls in (Shape, ArmRecipe))
    rest = {name: value for name, value in values.items() if name not in shape | recipe}
    return replace(
        plan,
        task=refined(plan.task, rest, (*Shape.__dataclass_fields__, *ArmRecipe.__dataclass_fields__)),
        shape=replace(plan.shape, **admitted(Shape, shape, "shape")),
        recipe=replace(plan.recipe, **admitted(ArmRecipe, recipe, "recipe")),
    )


def refined(task: Task, values: dict[str, Any], others: tuple[str, ...] = ()) -> Task:
    """The task with new values of some fields; `length` is a field of every task. others: fields that a wrong name may
    have meant."""
    names = [f.name for f in fields(task)]  # type: ignore[arg-type]
    if unknown := next((name for name in values if name not in (*names, "length")), None):
        meant = did_you_mean(unknown, (*names, *others))
        raise InputError(f"the task {task.name} has no field {unknown!r}{meant}")
    length = None if "length" in names else values.get("length")
    if length is not None:
        task = task.resized(checked(length, (Kind(int),), task.name, "length"))
        values = {k: v for k, v in values.items() if k != "length"}
    made: Any = replace(task, **admitted(type(task), values, task.name))  # type: ignore[type-var]
    if length not in (None, made.length):
        raise InputError(f"length={length} of {made}, whose rows have {made.length} positions; expected it left out")
    return made


def plan(task: Task, mixers: str | Sequence[str], seeds: int = 3, **settings: Any) -> Plan:
    """The plan of a task. mixers: in a list, or separated by commas. settings: fields of the shape and the recipe."""
    listed = zoo.several(mixers) if isinstance(mixers, str) else tuple(mixers)
    return having(Plan(task.name, listed, task, seeds=seeds), settings)


# --- the defaults ----------------------------------------------------------------------------------------------------
RECALLING = "transformer, retnet, softmax-retnet, gated-deltanet, softmax-gated-deltanet"
TRANSLATING = "rnn, luong, bahdanau, transformer-2017, t5, transformer, gated-deltanet"
REFLECTING = "gla, deltanet, negative-deltanet, negative-gated-deltanet"
TWO: dict[str, Any] = {"layers": 2, "heads": 4}
SHORT: dict[str, Any] = TWO | {"batch_size": 32, "lr": 3e-3}
BY_TEXT: dict[str, Any] = SHORT | {"seeds": 2, "held_out": 256}
ONE: dict[str, Any] = {"heads": 4, "steps": 600}
# With its own step sizes, up to 0.1, Gated DeltaNet has forgotten the number of a needle by the end of the row.
SLOW = "gated-deltanet(decay.dt_min=1e-5, decay.dt_max=1e-3)"
PAIR = plan(
    tasks.Pair(),
    "retnet(heads.expand_v=1), softmax-retnet(heads.expand_v=1), retnet(heads.expand_v=1, competition=sigmoid), "
    "retnet(heads.expand_v=1, heads.count=2)",
)
TEXT = plan(
    tasks.Text(length=96), "gla, softmax-gla, transformer", seeds=2, layers=2, mlp=128, steps=1000, batch_size=16,
    lr=6e-3, held_out=256,
)  # fmt: skip
REVERSE = plan(tasks.Reverse(), TRANSLATING, **TWO, steps=1500, lr=3e-3)
PLANS = (
    PAIR,
    plan(tasks.KeyValue(keys=16, pairs=4, length=24), RECALLING, **SHORT, steps=1500),
    # The default vocabulary of Mqar is Zoology's 8,192, with which nothing is learnt within these steps.
    plan(tasks.Mqar(vocabulary=40, pairs=4, length=16), RECALLING, **TWO, steps=1200, lr=3e-3),
    plan(tasks.Copy(length=32), RECALLING, **SHORT, steps=1500),
    plan(tasks.SelectiveCopy(symbols=8, copied=4, length=24), f"mamba, {RECALLING}", **SHORT, steps=1000),
    plan(tasks.Induction(length=32), RECALLING, **SHORT, steps=600),
    plan(
        tasks.Needle(length=512), f"transformer, {SLOW}, softmax-{SLOW}", seeds=1, hidden_size=128, **TWO, mlp=128,
        steps=2000, batch_size=8, lr=1e-3, held_out=128,
    ),
    plan(
        tasks.Digits(), "gla, softmax-gla, bert(mixer=gla), bert(mixer=softmax-gla), transformer", **TWO, steps=1000,
        held_out=359,
    ),
    TEXT,
    plan(tasks.Masked(length=64), "bert, bert(mixer=gla), bert(mixer=softmax-gla)", **BY_TEXT, steps=2000),
    REVERSE,
    plan(tasks.Dates(), TRANSLATING, **TWO, steps=1200),
    plan(tasks.Spans(length=64), "t5, t5(mixer=gla), t5(mixer=softmax-gla)", **BY_TEXT, steps=1500),
    # One layer, and permutations that are swaps: what one reflection per token can do (arXiv 2411.12537). A rotation is
    # two reflections, one in each layer.
    plan(tasks.Parity(), f"transformer, {REFLECTING}", **ONE, lr=3e-3),
    plan(
        tasks.ModularCounting(modulus=3), "gla, negative-deltanet, negative-gated-deltanet", **TWO, steps=1000, lr=3e-3,
    ),
    plan(tasks.S3(moved=2), f"transformer, {REFLECTING}", **ONE),
    plan(tasks.S5(moved=2), f"transformer, {REFLECTING}", **ONE),
    plan(tasks.FlipFlop(length=32), f"transformer, {REFLECTING}", **ONE),
    plan(tasks.Dyck(length=32), f"transformer, {REFLECTING}", **ONE),
)  # fmt: skip
DEFAULTS: dict[str, Plan] = {plan.task.name: plan for plan in PLANS}
# The settings and the learning rate of research/studies/capacity-linear-attention.yaml, with which all arms converge.
CAPACITY = plan(
    tasks.Pair(keys=48, pairs=32, least=4),
    "linear-attention, softmax-linear-attention, linear-attention(competition=sigmoid), "
    "softmax-linear-attention(competition.write=none)",
    hidden_size=32, heads=4, steps=1500, batch_size=32, evaluations=15,
)  # fmt: skip
DEMO = Study("demo", "Does head competition help?", (CAPACITY, having(TEXT, {"steps": 300})))

# --- suites: lists of plans that every mixer runs by itself, so that its row stands beside those of others -----------
REFERENCE = "transformer"  # every model of a suite has as many parameters as this one's


def of_suite(task: Task, lr: tuple[float, ...], name: str = "", **settings: Any) -> Plan:
    """A plan of a suite, which searches the learning rate among `lr`."""
    common = {"heads": 4, "mlp": 128, "steps": 400, "batch_size": 32, "evaluations": 3}
    made = plan(task, REFERENCE, seeds=5, **common | settings)
    return replace(made, name=name or made.name, tuning=Tuning("lr", lr, (5,)), reference=REFERENCE)


TRACKING_LRS, RECALL_LRS = (3e-3, 6e-3, 1.2e-2), (1.5e-3, 3e-3, 6e-3)
SMALL = (
    of_suite(tasks.Parity(length=32), TRACKING_LRS),
    of_suite(tasks.S3(length=16), TRACKING_LRS, steps=500),
    # Permutations that move three points at most are products of two reflections; all 120 are not learnt in this time.
    of_suite(tasks.S5(length=8, moved=3), TRACKING_LRS, steps=1000, batch_size=64),
    of_suite(tasks.FlipFlop(length=32), TRACKING_LRS),
    of_suite(tasks.Dyck(length=32), TRACKING_LRS),
    of_suite(tasks.Mqar(vocabulary=72, pairs=4, length=16), RECALL_LRS, layers=2, steps=600, batch_size=64),
    of_suite(tasks.SelectiveCopy(symbols=8, copied=4, length=24), RECALL_LRS, layers=2),
    of_suite(tasks.Induction(length=32), RECALL_LRS, "needle", layers=2, steps=600),
    of_suite(tasks.Text(length=64), RECALL_LRS, layers=2, batch_size=16),
)
SUITES: dict[str, tuple[Plan, ...]] = {"small": SMALL}
