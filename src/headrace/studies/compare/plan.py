"""What a comparison is, as data: mixers, a task, a model's shape, a recipe, seeds. A study is a list of comparisons
with one report; the demo is one of them.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from ... import zoo
from ...spec.encoder_decoder import ModelSpec
from ...spec.linear import to_json
from ...spec.stack import BertSpec
from ...tasks import Digits, Masked, Sequences, Task
from ...utils.errors import InputError

MATCHED = 1.05  # the most parameters over the fewest, from which on models are not called matched


@dataclass(frozen=True)
class Shape:
    """The model around the mixer. `mlp`: MLP width of the model with the most parameters; the others' widths follow, so
    that all have as many. None: no MLP where parameters are matched without one, and `hidden_size` elsewhere; 0: no
    MLP, whether or not that matches."""

    hidden_size: int = 64
    layers: int = 1
    heads: int = 8
    mlp: int | None = None


@dataclass(frozen=True)
class Recipe:
    """AdamW, linear warm-up, cosine to a twentieth, gradients clipped at norm 1."""

    steps: int = 300
    batch_size: int = 64
    lr: float = 1e-2
    warmup: float = 1 / 15  # of the steps
    weight_decay: float = 0.1
    evaluations: int = 10
    held_out: int = 512  # rows
    gate_lr: float = 1.0  # of the competition's weights, times lr
    gate_std: float = 0.0  # of their initial values
    gate_init: Literal["normal", "orthogonal"] = "normal"


@dataclass(frozen=True)
class Plan:
    """Everything that fixes a comparison's numbers."""

    name: str
    mixers: tuple[str, ...]
    task: Task
    shape: Shape = field(default_factory=Shape)
    recipe: Recipe = field(default_factory=Recipe)
    seeds: int = 3

    def check(self) -> None:
        """Raise InputError for anything a user can have got wrong, before any work begins."""
        positive = {"steps": self.recipe.steps, "batch-size": self.recipe.batch_size, "lr": self.recipe.lr}
        positive |= {"layers": self.shape.layers, "heads": self.shape.heads, "hidden-size": self.shape.hidden_size}
        if self.shape.mlp is not None and self.shape.mlp < 0:
            raise InputError(f"shape.mlp={self.shape.mlp}; expected at least 0")
        for name, value in (positive | {"seeds": self.seeds}).items():
            if not value > 0:
                raise InputError(f"--{name}={value}; expected more than 0")
        if len(set(self.mixers)) < len(self.mixers) or not self.mixers:
            raise InputError(f"--mixers names {len(self.mixers)} mixers; expected at least one, and each once")
        for mixer in self.mixers:
            zoo.get(mixer).head_dims(self.shape.hidden_size, self.shape.heads)
            if not answers(zoo.get(mixer), self.task):
                raise InputError(
                    f"mixer {mixer!r} cannot answer --task {self.task.name}: masked is for bert alone, digits for bert "
                    "and for mixers, reverse, dates and spans are for all but bert, the rest is for mixers and decoders"
                )
        self.task.held_out(1)  # what it is made from is there

    def arms(self) -> list["Arm"]:
        """Seed by seed, so that an interrupted comparison has something to say about every mixer."""
        widths = self.widths()
        return [
            Arm(self, mixer, to_json(zoo.get(mixer)), widths[mixer], seed)
            for seed in range(self.seeds)
            for mixer in self.mixers
        ]

    def idle_gates(self) -> list[str]:
        """A sentence for each gate of these mixers that cannot act, or hardly."""
        return [f"{mixer}: {idle}" for mixer in self.mixers for idle in zoo.get(mixer).idle_gates(self.shape.heads)]

    def widths(self) -> dict[str, int | None]:
        """MLP width by mixer. Gates are not counted: a mixer and its softmax version are equally wide."""
        from .widths import match

        specs = tuple(zoo.plain(zoo.get(mixer)) for mixer in self.mixers)
        return dict(zip(self.mixers, match(self, specs), strict=True))

    @cached_property
    def positions(self) -> int:
        """Room for the longest row, source and target after one another and held-out lengths too."""
        longest = max([*self.task.by_length(1), self.task.length])
        return 2 * longest + 1 if isinstance(self.task, Sequences) else longest

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["task"] = {"name": self.task.name, **data["task"]}
        if sha256 := getattr(self.task, "sha256", None):  # of what is read from files
            data["task"]["sha256"] = sha256
        data["length"] = self.task.length
        data["widths"] = self.widths()
        data["specs"] = {mixer: to_json(zoo.get(mixer)) for mixer in self.mixers}
        return data


@dataclass(frozen=True)
class Arm:
    """One mixer trained from one seed. `spec` travels with it, so that a worker needs no zoo of its own."""

    plan: Plan
    mixer: str
    spec: dict[str, Any]
    width: int | None
    seed: int

    @property
    def slug(self) -> str:
        mixer = re.sub(r"[^a-z0-9.+]+", "-", self.mixer.lower()).strip("-")
        return f"{self.plan.name}-{mixer}-seed{self.seed}"


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    plans: tuple[Plan, ...]
    sweep: dict[str, Any] | None = None  # {field, values: one for each plan}

    def arms(self) -> list[Arm]:
        return [arm for plan in self.plans for arm in plan.arms()]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": self.name,
            "title": self.title,
            "plans": [plan.to_json() for plan in self.plans],
        }
        data |= {"sweep": self.sweep} if self.sweep else {}
        return json.loads(json.dumps(data))  # as it is read back: lists for tuples


def answers(spec, task: Task) -> bool:
    """Whether rows of the task are what the mixer or whole model of the spec reads."""
    if isinstance(spec, BertSpec):
        return isinstance(task, Masked | Digits)
    if isinstance(task, Masked):
        return False
    return isinstance(task, Sequences) or not isinstance(spec, ModelSpec)
