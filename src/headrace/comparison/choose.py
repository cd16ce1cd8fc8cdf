"""Makes a study from the options of `headrace compare`, which a plan's file may have: the defaults of the task with the
changes of the user.

A plan's file is a study that is written down before its runs, in YAML:

    question: Does competition raise the number of pairs that a memory holds?
    cost: about 2 hours of one core
    task: pair(pairs=24, least=4)         options of `headrace compare` but --match, by their names without the dashes
    tune: lr=3e-3,1e-2,3e-2
    seeds: 0-4
    mixers:                               name -> expression, where {…} stand for the values under `over`
      none: "{backbone}(heads.expand_v=1)"
      softmax: "softmax-{backbone}(heads.expand_v=1)"
    over:                                 optional: every mixer once for each
      - {backbone: retnet}
      - {backbone: gla}
    compare: [softmax - none]             differences of two named mixers; the first is the primary one
    measure: capacity                     score, losses, speed or capacity (hypotheses.py)
    test: t                               or wilcoxon; corrected over all comparisons by Holm's rule

The study's folder holds the plan, so that one that is changed after runs were made is refused.
"""

import re
import reprlib
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .. import zoo
from ..extra.specs.matrix import KINDS, MatrixSpec
from ..extra.specs.scan import ScanSpec
from ..files.checks import misfit
from ..files.results import file_names
from ..spec.linear import MixerSpec
from ..spec.mixer import Spec
from ..spec.serialize import change
from ..spec.stack import Decoder
from ..tasks import Task, Text
from ..training.optimization import Optimization
from ..training.recipes import read_yaml
from ..utils import plugins
from ..utils.errors import InputError, did_you_mean, reading, require
from .defaults import DEFAULTS, DEMO, having, refined
from .model import ArmRecipe, Shape
from .plan import Plan, Question, Study, Tuning, numbers

ASKED = ("question", "cost", "mixers", "over", "compare", "measure", "test")  # what only a plan's file has
OF_STUDY = ("task", "text", "tokenizer", "sweep", "tune", "tune_seeds")
SEEDED = int, str, [int]
# The form of a plan's file, but for what goes to the records of the study.
PLAN = {
    "question": str, "mixers": {...: str}, "compare": [str], "over?": [{}], "task?": str, "text?": (str, [str]),
    "tokenizer?": str, "sweep?": str, "tune?": str, "seeds?": SEEDED, "tune_seeds?": SEEDED,
}  # fmt: skip
SEEDS = 3  # number of seeds of a search without seeds of its own: those after the largest that is reported
MOST_SEEDS = 2**16
MOST = 2**14  # largest value of a size that is tried


def choose(
    task: str | None = None, text: str | list[str] | None = None, tokenizer: str | None = None,
    sweep: str | None = None, tune: str | None = None, tune_seeds: str | int | None = None, match: str | None = None,
    **changes: Any,
) -> Study:  # fmt: skip
    """The study for a task, or the demo if nothing is chosen.

    Args:
        task: an expression such as `mqar(pairs=16)`; None: text if there are files, else pair.
        text: text files for a language-modelling task.
        tokenizer: of a language-modelling task: a file, a folder or a name on the Hub; None or "bytes": bytes.
        sweep: `FIELD=VALUE,VALUE,…` for a plan at each value of a field.
        tune: `FIELD=VALUE,VALUE,…` for a search over values of a field of the recipe, for each mixer apart.
        tune_seeds: seeds of the search, as for `seeds`; None: others than those reported.
        match: what the models have equally many of: parameters, or with "state" also numbers of the state.
        changes: values of fields of the plan, shape and recipe, and of `length`; None keeps the default.

    Raises:
        InputError: an unknown task or field, a field set twice, or a text file or tokenizer for a task without text.
    """
    files = [text] if isinstance(text, str) else text or []
    changes = {name: value for name, value in changes.items() if value is not None}
    demo = task is None and not files and "mixers" not in changes and sweep is None
    if demo and tokenizer is not None:
        raise InputError(f"--tokenizer {tokenizer} needs a task with text; add --text FILE or --task text")
    alone = [option.partition("=")[0].strip() for option in (sweep, tune) if option]
    alone += ["files"] * bool(files) + ["tokenizer"] * (tokenizer is not None)
    names = [*changes, *(zoo.expression(task, "--task")[1] if task else ()), *alone]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise InputError(
            f"{twice!r} is set twice, by --task, --sweep, --tune or its own option; expected each field once"
        )
    if demo:
        study = replace(DEMO, plans=tuple(changed(plan, changes) for plan in DEMO.plans))
    else:
        plan = changed(with_text(default(task or ("text" if files else "pair")), files, tokenizer), changes)
        study = swept(plan, sweep) if sweep else Study(plan.name, f"Mixers compared: {plan.name}", (plan,))
        if "length" in changes and {each.task.length for each in study.plans} != {plan.task.length}:
            raise InputError(f"--length {plan.task.length} and --sweep {sweep}, which decides it; expected one of them")
    return tuned(matched(study, match), tune, tune_seeds)


def matched(study: Study, match: str | None) -> Study:
    """The study with mixers whose states match, if `match` asks for it."""
    require(match in (None, "parameters", "state"), f"--match={match!r}; expected parameters or state")
    if match != "state":
        return study
    plans = tuple(replace(plan, mixers=match_states(plan.mixers, plan.shape)) for plan in study.plans)
    return replace(study, plans=plans)


def with_text(plan: Plan, files: list[str], tokenizer: str | None) -> Plan:
    if not files and tokenizer is None:
        return plan
    if not isinstance(plan.task, Text):
        raise InputError(
            f"--task {plan.task.name} has no text; expected text, masked or spans with text files or --tokenizer"
        )
    given: dict[str, Any] = {"files": tuple(files)} if files else {}
    given |= {} if tokenizer is None else {"tokenizer": None if tokenizer == "bytes" else tokenizer}
    return replace(plan, task=replace(plan.task, **given))


def tuned(study: Study, tune: str | None, tune_seeds: str | int | None) -> Study:
    """The study with the search that `tune` asks for in each of its plans."""
    if tune is None:
        require(tune_seeds is None, f"--tune-seeds {tune_seeds} needs a search; add --tune FIELD=VALUE,VALUE,…")
        return study
    field, _, listed = (part.strip() for part in tune.partition("="))
    values = tuple(map(zoo.literal, zoo.split(listed)))
    if not values or field not in Optimization.__dataclass_fields__:
        raise InputError(f"--tune {tune!r}; expected FIELD=VALUE,VALUE,… with a field such as lr")
    require(len(set(values)) == len(values), f"--tune {tune!r} has a value twice; expected distinct values")
    plans = []
    for plan in study.plans:
        first = max(plan.seed_numbers, default=0) + 1
        own = range(first, first + SEEDS) if tune_seeds is None else numbers(seeds(tune_seeds, "--tune-seeds"))
        plans.append(replace(plan, tuning=Tuning(field, values, tuple(own))))
    return replace(study, plans=tuple(plans))


def planned(path: Path) -> Study:
    """The study of a plan's file. InputError for a file that is no plan, and for an unknown option."""
    asked, options = read_plan(path)
    known = {*OF_STUDY, "mixers", "seeds", "length", *(f.name for record in (Shape, ArmRecipe) for f in fields(record))}
    if unknown := next((name for name in options if name not in known), None):
        meant = did_you_mean(unknown, known)
        raise InputError(f"--plan {str(path)!r} sets {unknown!r}, which is no option{meant}")
    study = choose(**options)
    if unfit := next(filter(None, (unfit_for(asked.measure, plan.task) for plan in study.plans)), None):
        raise InputError(f"--plan {str(path)!r} has measure: {asked.measure}, but {unfit}")
    return replace(study, name=path.stem, title=asked.text, question=asked)


def unfit_for(measure: str, task: Task) -> str | None:
    """Why a task has no such measure; None if it has."""
    named, metric = f"the task {task.name}", task.metric
    if measure == "losses" and metric.name != "loss":
        return f"the score of {named} is {metric.name}; expected a task whose score is the loss, such as text"
    if measure in ("capacity", "speed") and not metric.higher_is_better:
        return f"less is better of the {metric.name} of {named}; expected a task that is solved, such as pair(least=4)"
    if measure == "capacity" and not task.by_length(1):
        return f"{named} is tested at one length; expected a task with several, such as pair(least=4)"
    return None


def read_plan(path: Path) -> tuple[Question, dict[str, Any]]:
    """The question of a plan's file, and the options of `headrace compare`. InputError for a file that is no plan."""
    data = read_yaml(path)
    if wrong := misfit(data, PLAN):
        raise InputError(f"--plan {str(path)!r} is no plan: {wrong}")
    options = {name: value for name, value in data.items() if name not in ASKED}
    names: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for values in data.get("over", [{}]):
        with reading(f"--plan {str(path)!r}: {values} under `over` do not fit the mixers"):
            filled = {name: mixer.format(**values).strip() for name, mixer in data["mixers"].items()}
        if several := next((mixer for mixer in filled.values() if len(zoo.split(mixer)) != 1), None):
            raise InputError(f"--plan {str(path)!r}: {several!r} under `mixers`; expected one mixer under each name")
        label = " ".join(str(value) for value in values.values() if "=" not in str(value))
        names |= {mixer: name if mixer in names else f"{label} {name}".strip() for name, mixer in filled.items()}
        pairs += [named(text, filled, path) for text in data["compare"]]
    if twice := next((name for i, name in enumerate(names.values()) if name in list(names.values())[:i]), None):
        raise InputError(f"--plan {str(path)!r}: two mixers are named {twice!r}; expected `over` to tell them apart")
    question = Question(
        data["question"], tuple(names.items()), tuple(pairs), data.get("measure", "score"), data.get("test", "t"),
        str(data.get("cost", "")),
    )  # fmt: skip
    return question, options | {"mixers": ",".join(names)}


def named(text: str, mixers: dict[str, str], path: Path) -> tuple[str, str]:
    a, _, b = (part.strip() for part in text.partition(" - "))
    if not {a, b} <= mixers.keys() or mixers[a] == mixers[b]:
        known = ", ".join(map(str, mixers))
        raise InputError(f"--plan {str(path)!r}: {text!r} under `compare`; expected NAME - NAME, two mixers of {known}")
    return mixers[a], mixers[b]


def seeds(text: str | int | list[int], name: str = "--seeds") -> int | tuple[int, ...]:
    """A number of seeds, or the seeds that a list of numbers and ranges names: "3", "10-14" or "7,10-14"."""
    if isinstance(text, list):
        return tuple(text)
    ends = [part.split("-") for part in str(text).replace(" ", "").split(",")]
    if not all(len(pair) <= 2 and all(re.fullmatch(r"\d{1,10}", end) for end in pair) for pair in ends):
        raise InputError(f"{name} {reprlib.repr(text)}; expected a number of seeds, or seeds such as 10-14 or 7,10-14")
    alone = len(ends) == len(ends[0]) == 1
    parts = [range(int(ends[0][0]))] if alone else [range(int(pair[0]), int(pair[-1]) + 1) for pair in ends]
    if (count := sum(map(len, parts))) > MOST_SEEDS:
        raise InputError(f"{name} {reprlib.repr(text)} asks for {count} seeds; expected at most {MOST_SEEDS}")
    if alone:
        return count
    named = tuple(chain.from_iterable(parts))
    if not named or len(set(named)) < len(named):
        raise InputError(f"{name} {text!r} names {'a seed twice' if named else 'none'}; expected different seeds")
    return named


def default(task: str) -> Plan:
    """The default plan of a task. The task is an expression that can set fields: `mqar(pairs=16, length=128)`."""
    name, settings = zoo.expression(task, "--task")
    if name not in DEFAULTS:
        plugins.load()
    if name not in DEFAULTS:
        raise InputError(f"--task {name!r} is unknown; expected one of {', '.join(DEFAULTS)} (--plugin adds others)")
    plan = DEFAULTS[name]
    return replace(plan, task=refined(plan.task, {field: zoo.literal(value) for field, value in settings.items()}))


def swept(plan: Plan, sweep: str) -> Study:
    """A study with a plan for each value of a field of the task, the shape or the recipe."""
    name, _, listed = (part.strip() for part in sweep.partition("="))
    values = [zoo.literal(value) for value in zoo.split(listed)]
    if len(set(values)) < len(values) or not values:
        raise InputError(f"--sweep {sweep!r}; expected FIELD=VALUE,VALUE,… with distinct values")
    spelt = file_names(map(str, values), lambda value: re.sub(r"[^A-Za-z0-9.+]+", "-", value))
    plans = tuple(replace(having(plan, {name: v}), name=f"{plan.name}-{name}-{spelt[str(v)]}") for v in values)
    about = {"field": name, "values": values}
    return Study(f"{plan.name}-by-{name}", f"Mixers compared: {plan.name}, by {name}", plans, about)


def changed(plan: Plan, changes: dict[str, Any]) -> Plan:
    """The plan with other mixers, seeds, and values of fields of its task, shape and recipe."""
    changes = dict(changes)
    mixers = zoo.several(changes.pop("mixers")) if "mixers" in changes else plan.mixers
    named = seeds(changes.pop("seeds")) if "seeds" in changes else plan.seeds
    # A hybrid needs as many layers as its pattern has; the other mixers get the same depth.
    patterns = (len(spec.layers) if isinstance(spec := zoo.get(mixer), Decoder) else 1 for mixer in mixers)
    layers = max((plan.shape.layers, *patterns))
    return replace(having(plan, {"layers": layers} | changes), mixers=mixers, seeds=named)


# --- states ----------------------------------------------------------------------------------------------------------
def match_states(mixers: tuple[str, ...], shape: Shape) -> tuple[str, ...]:
    """The mixers as expressions that set a size of each (`size_field`), so that its state is as near as possible in
    size to the largest state of them. Attention, whose cache grows, mixers without such a size, and those that set it
    themselves stay as they are.

    Raises:
        InputError: one of the mixers is a whole model, or a sequence of several mixers.
    """
    specs = {mixer: zoo.get(mixer) for mixer in mixers}
    if whole := next((mixer for mixer, spec in specs.items() if not isinstance(spec, Spec)), None):
        raise InputError(f"--match state with {whole!r}, which has several mixers; expected single mixers")
    sizes = [state_numbers(spec, shape) for spec in specs.values() if not spec.facts.cached]
    return tuple(resized(mixer, spec, shape, max(sizes)) if sizes else mixer for mixer, spec in specs.items())


def state_numbers(spec: Spec, shape: Shape) -> int:
    """The numbers in the state of one layer."""
    return spec.state_bytes(shape.hidden_size, shape.heads, itemsize=1)


def size_field(spec: Spec) -> str | None:
    """The field that sets how many numbers the state has, without another number of heads or channels."""
    if isinstance(spec, ScanSpec):
        return "state_size" if spec.state_size else None
    if isinstance(spec, MatrixSpec):
        return "slots" if "slots" in KINDS[spec.kind].fields else None
    return "heads.key_dim" if isinstance(spec, MixerSpec) else None


def resized(mixer: str, spec: Spec, shape: Shape, target: int) -> str:
    """The expression of the mixer whose state is the nearest to `target` numbers."""
    (name, settings), field = zoo.expression(mixer, "mixer"), size_field(spec)
    if field is None or field in settings or state_numbers(spec, shape) == target:
        return mixer
    found: dict[int, int] = {}  # value of the field -> distance to the target; it falls, then grows
    for value in range(1, MOST):
        try:
            size = state_numbers(change(spec, field, value), shape)
        except InputError:  # an odd number of channels that rotate
            continue
        found[value] = abs(size - target)
        if size >= target:
            break
    best = min(found, key=found.__getitem__)
    return f"{name}({', '.join(f'{key}={value}' for key, value in (settings | {field: str(best)}).items())})"
