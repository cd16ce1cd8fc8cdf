"""A comparison as data: mixers, a task, the shape of the model, a training recipe and seeds. A study is a list of
comparisons with one report."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from .. import zoo
from ..files.engine import Claim
from ..files.memory import fitting
from ..files.provenance import Place, defaults
from ..history.specs.stack import BertSpec, StackSpec
from ..layers.blocks.widths import default_intermediate_size
from ..ops.checks import require
from ..spec.mixer import ModelSpec
from ..spec.record import Record
from ..spec.serialize import admitted, record, to_json
from ..tasks import Digits, Masked, Sequences, Task
from ..tasks.base import Part
from ..utils.errors import InputError
from ..utils.integrity import digest
from .model import ArmRecipe, Shape, build, positions

MATCHED = 1.05  # largest ratio of two sizes that are called matched


def spelt(mixer: str) -> str:
    """The mixer in the name of a file; those of two mixers may be alike."""
    return re.sub(r"[^a-z0-9.+]+", "-", mixer.lower()).strip("-")


def numbers(seeds: int | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(seeds)) if isinstance(seeds, int) else seeds


@dataclass(frozen=True)
class Tuning:
    """A search over values of a field of the recipe, for each mixer apart (tuning.py). The reported seeds are not among
    `seeds`."""

    field: str
    values: tuple[Any, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One comparison: everything that its scores depend on."""

    name: str
    mixers: tuple[str, ...]
    task: Task
    shape: Shape = field(default_factory=Shape)
    recipe: ArmRecipe = field(default_factory=ArmRecipe)
    seeds: int | tuple[int, ...] = 3  # a number: so many, from 0; a tuple: these
    tuning: Tuning | None = None
    reference: str | None = None  # the mixer whose number of parameters all models have; None: the largest model's
    part: Part = "held-out"  # the rows on which the arms are evaluated: those of a search are not the reported ones

    def check(self) -> None:
        """Checks the plan before training begins.

        Raises:
            InputError: a value out of range, a repeated or unknown mixer, a mixer that cannot train on the task, or
                missing data.
        """
        if not (seeds := self.seed_numbers):
            raise InputError(f"--seeds={self.seeds}; expected more than 0")
        if len({*seeds}) < len(seeds) or not 0 <= min(seeds) <= max(seeds) < 2**32:
            raise InputError(f"--seeds={self.seeds}; expected different ones from 0 to {2**32 - 1}")
        if len(set(self.mixers)) < len(self.mixers) or not self.mixers:
            raise InputError(f"--mixers={','.join(self.mixers)!r}; expected at least one mixer, and each mixer once")
        for mixer in self.mixers:
            zoo.get(mixer).head_dims(self.shape.hidden_size, self.shape.heads)
            if not answers(zoo.get(mixer), self.task):
                raise InputError(
                    f"mixer {mixer!r} cannot train on --task {self.task.name}: masked takes bert only; digits takes "
                    "bert, mixers and decoders; reverse, dates and spans take all but bert; the other tasks take "
                    "mixers and decoders"
                )
        for trial in self.trials():
            trial.check()
        if shared := set(self.tuning.seeds if self.tuning else ()) & set(self.seed_numbers):
            raise InputError(f"seed {min(shared)} is among those of the search and those reported; expected others")
        with fitting(f"a block of rows of {self.task}"):  # InputError if the task's data are missing, or too few
            _ = self.task.training(0, 1)[0]
            self.task.held_out(1, self.part)
            self.task.by_length(1)

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        return numbers(self.seeds)

    def arms(self, tuned: dict[str, Any] | None = None) -> list["Arm"]:
        """All arms, seed by seed, so that an interrupted comparison has results for every mixer.

        tuned: mixer -> its value of the tuned field; without it, all arms have the value of the recipe."""
        widths = self.widths()
        plans = {mixer: self.at(tuned[mixer]) if tuned else self for mixer in self.mixers}
        return [
            Arm(plans[mixer], mixer, to_json(zoo.get(mixer)), widths[mixer], seed)
            for seed in self.seed_numbers
            for mixer in self.mixers
        ]

    def at(self, value: Any) -> "Plan":
        """The plan with a value of the tuned field."""
        values = admitted(ArmRecipe, {self.tuning.field: value}, "recipe")  # type: ignore[union-attr]
        return replace(self, recipe=replace(self.recipe, **values))

    def trials(self) -> list["Plan"]:
        """A plan for each value of the search, if there is one."""
        if self.tuning is None:
            return []
        search, field, values = replace(self, seeds=self.tuning.seeds), self.tuning.field, self.tuning.values
        return [replace(search.at(v), name=f"{self.name}-{field}-{v}", tuning=None, part="tuning") for v in values]

    def notes(self) -> list[str]:
        """A sentence for each gate of the mixers that has little or no effect, and for what is left out of the text."""
        sizes = self.shape.hidden_size, self.shape.heads
        idle = [f"{mixer}: {idle}" for mixer in self.mixers for idle in zoo.get(mixer).idle_gates(*sizes)]
        return [*idle, *getattr(self.task, "notes", ())]

    def widths(self) -> dict[str, int | None]:
        """Mixer -> MLP width. Gate parameters are not counted, so a mixer and its softmax version have equal widths."""
        specs = tuple(zoo.plain(zoo.get(mixer)) for mixer in self.mixers)
        reference = zoo.get(self.reference) if self.reference else None
        return dict(zip(self.mixers, match(self, specs, reference, self.task.vocab_size), strict=True))

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        del data["part"]  # of a study's plans always the same
        data["task"] = {"name": self.task.name, **data["task"]}
        data["task"] |= getattr(self.task, "provenance", {})  # of the files that the task reads
        data["length"] = self.task.length
        data["widths"] = self.widths()
        values = self.tuning.values if self.tuning else ()
        data["trials"] = [{"name": t.name, "value": v} for t, v in zip(self.trials(), values, strict=True)]
        data["specs"] = {mixer: to_json(zoo.get(mixer)) for mixer in self.mixers}
        return data


@dataclass(frozen=True)
class Arm:
    """One mixer trained with one seed. `spec` is the mixer as JSON, so that workers need no entry in the zoo."""

    plan: Plan
    mixer: str
    spec: dict[str, Any]
    width: int | None
    seed: int

    @property
    def slug(self) -> str:
        """The name of its folder, with a digest, as two mixers may be spelt alike."""
        known = digest([self.plan.name, self.mixer, self.seed])[:8]
        return f"{self.plan.name}-{spelt(self.mixer)}-seed{self.seed}-{known}"

    @property
    def result(self) -> Path:
        """The file of its result, in the folder of its study."""
        return Path("arms", self.slug, "result.json")


@dataclass(frozen=True)
class Question(Record):
    """What a study asks. pairs: (a, b) for the difference of the values of the mixers a and b."""

    text: str
    names: tuple[tuple[str, ...], ...]  # (expression, name) of each mixer
    pairs: tuple[tuple[str, ...], ...]
    measure: Literal["score", "losses", "speed", "capacity"] = "score"
    test: Literal["t", "wilcoxon"] = "t"
    cost: str = ""

    def _objections(self) -> Iterator[tuple[bool, str]]:
        yield not self.pairs, "the plan has nothing under `compare`; expected differences such as softmax - none"

    @classmethod
    def stored(cls, results: dict[str, Any]) -> "Question | None":
        """The question of a results.json, if the study has one."""
        data = results["study"].get("question")
        return record(cls, data, "question") if data else None

    def name(self, mixer: str) -> str:
        return next(name for expression, name in self.names if expression == mixer)


@dataclass(frozen=True)
class Study:
    """Comparisons with one report."""

    name: str
    title: str
    plans: tuple[Plan, ...]
    sweep: dict[str, Any] | None = None  # {field, values: one for each plan}
    question: Question | None = None  # of a study that was written down before its runs

    def trials(self) -> list[Plan]:
        return [trial for plan in self.plans for trial in plan.trials()]

    def arms(self, tuned: dict[str, dict[str, Any]] | None = None) -> list[Arm]:
        """The reported arms. tuned: name of a plan -> its mixers' values of the tuned field."""
        return [arm for plan in self.plans for arm in plan.arms((tuned or {}).get(plan.name))]

    def claim(self) -> Claim:
        """The claim of the folder of its runs."""
        return Claim(self.to_json(), self.optional())

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "title": self.title, "plans": [p.to_json() for p in self.plans]}
        data |= {"sweep": self.sweep} if self.sweep else {}
        data |= {"question": asdict(self.question)} if self.question else {}
        return json.loads(json.dumps(data))  # equal to what is read back: lists for tuples

    def optional(self) -> set[Place]:
        """The places of `to_json` that have their default, or that the plan of an older version may lack."""
        specs = [{"specs": {mixer: zoo.get(mixer) for mixer in plan.mixers}} for plan in self.plans]
        tokens = (("plans", i, "task", "tokenizer_sha256") for i in range(len(specs)))
        return {*defaults(self), *defaults({"plans": specs}), *tokens}


def answers(spec, task: Task) -> bool:
    """Whether a model of the spec can train on the task."""
    if isinstance(spec, BertSpec):
        return isinstance(task, Masked | Digits)
    return not isinstance(task, Masked) and (isinstance(task, Sequences) or not isinstance(spec, ModelSpec))


# --- widths ----------------------------------------------------------------------------------------------------------
@cache
def match(plan: Plan, specs: tuple[Any, ...], reference: Any = None, vocab_size: int = 0) -> tuple[int | None, ...]:
    """The MLP width for each spec; None for a model without an MLP of free width, such as an encoder-decoder RNN.

    reference: the spec whose number of parameters the models have, with the MLP of the plan; None: the largest model's.
    vocab_size: the task's, by its files. InputError for a model larger than the reference with the narrowest MLP."""
    shape = plan.shape
    if shape.mlp == 0:
        return (None,) * len(specs)
    _ = positions(plan.task), plan.task.vocab_size  # cached here: on the meta device rows and files cannot be read

    def size(spec: Any, width: int | None) -> int:
        with torch.device("meta"):  # which takes no memory
            return sum(p.numel() for p in build(Arm(plan, "", to_json(spec), width, seed=0)).parameters())

    if shape.mlp is None and reference is None and not any(isinstance(spec, ModelSpec) for spec in specs):
        sizes = [size(spec, None) for spec in specs]
        if max(sizes) <= MATCHED * min(sizes):
            return (None,) * len(specs)
    target = max(size(spec, usual(shape, spec)) for spec in (specs if reference is None else (reference,)))
    return tuple(match_intermediate_size(partial(size, spec), target) for spec in specs)


def usual(shape: Shape, spec: Any) -> int:
    """The MLP width in the largest model."""
    if shape.mlp is None and isinstance(spec, StackSpec):
        return default_intermediate_size(shape.hidden_size, spec.style.gated)
    return shape.mlp or shape.hidden_size


def match_intermediate_size(size: Callable[[int], int], target: int) -> int | None:
    """Returns the MLP width with which a model has the number of parameters nearest to `target`; None for a model
    without an MLP.

    size(width) is the number of parameters. It is linear in the width, so that two models are counted. Raises
    InputError if it is more than `target` with width 1."""
    least = size(1)
    per_width = size(2) - least
    if per_width == 0:
        return None
    width = round(1 + (target - least) / per_width)
    require(width >= 1, f"the model has {least} parameters with the narrowest MLP; expected at most target={target}")
    return width
