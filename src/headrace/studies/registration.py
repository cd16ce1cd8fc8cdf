"""The names that a plug-in or a program adds: mixers, models and tasks, known from then on like those of headrace."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from .. import zoo
from ..layers.module import module_spec
from ..spec.mixer import ModelSpec, Spec
from ..spec.stack import Decoder
from ..utils import plugins
from ..utils.errors import InputError, reading
from ..utils.extras import require
from ..zoo.entry import Entry

NAME = re.compile(r"(?!softmax-|recurrent-)[a-z0-9]+([._-][a-z0-9]+)*")


def register_mixer(name: str, mixer: Any) -> None:
    """Adds a mixer to the zoo.

    Args:
        name: its name. For a MixerSpec, softmax-NAME is then known too, in which the heads compete.
        mixer: a MixerSpec or another spec of a mixer, an expression such as "gla(heads.count=2)", or a class of
            `nn.Module` with the protocol of `headrace.layers.module`.

    Raises:
        InputError: for a name that exists or is none, and for what is no mixer.
    """
    check_name("mixer", name, {*zoo.names(), *zoo.MODELS})
    if isinstance(mixer, type) and issubclass(mixer, nn.Module):
        with reading(f"mixer {name!r} cannot be registered"):
            spec: Any = module_spec(name, mixer, plugins.of(mixer))
    elif not isinstance(spec := zoo.get(mixer), Spec):
        raise InputError(f"mixer {name!r} is a whole model; expected a mixer, or register_model for it")
    zoo.register(name, Entry("", "", spec))
    plugins.note_registration()


def register_model(name: str, model: Any) -> None:
    """Adds a whole model to the zoo.

    Args:
        name: its name.
        model: a Decoder or another spec of a whole model, or an expression such as "gla+gla+transformer", a decoder
            whose layers alternate.

    Raises:
        InputError: for a name that exists or is none, and for what is no whole model.
    """
    check_name("model", name, {*zoo.names(), *zoo.MODELS})
    if not isinstance(spec := zoo.get(model), Decoder | ModelSpec):
        raise InputError(f"model {name!r} is the mixer of one layer; expected a whole model, or register_mixer for it")
    zoo.register(name, Entry("", "", spec))
    plugins.note_registration()


def register_task(
    name: str, task: Any, mixers: Sequence[str] = ("gla", "softmax-gla", "transformer"), **settings
) -> None:
    """Adds a task to those of `headrace compare` and `headrace prepare`.

    Args:
        name: its name.
        task: an instance of a frozen dataclass with the protocol of `headrace.tasks.Task`. The values of its fields are
            the task's defaults. The docstring of its class describes it in reports.
        mixers: the mixers that are compared by default.
        settings: defaults of a comparison that differ from those of `pair`: fields of the model (`layers`, `heads`,
            `hidden_size`, `mlp`) and of its training (`steps`, `batch_size`, `lr`, ...).

    Raises:
        InputError: for a name that exists or is none, and for a task without everything that a comparison needs.
    """
    require("register_task", "transformers")
    from ..tasks import TASKS
    from ..tasks.check import check_task
    from .compare.choose import having
    from .compare.defaults import DEFAULTS
    from .compare.plan import Plan

    check_name("task", name, TASKS)
    if "name" not in vars(type(task)):
        type(task).name = name
    if task.name != name:
        raise InputError(f"task {name!r} has the name {task.name!r} in its class; expected the same, or none")
    check_task(name, task)
    TASKS[name], DEFAULTS[name] = type(task), having(Plan(name, tuple(mixers), task), settings)
    plugins.note_registration()


def check_name(kind: str, name: Any, names: Collection[str]) -> None:
    """Raises InputError for a name that an expression could not have, and for one that exists."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{kind} {name!r} has no name for expressions; expected small letters and digits, in parts joined by - or "
            "., and another beginning than softmax- and recurrent-"
        )
    if taken := next((known for known in (name, f"softmax-{name}") if known in names), None):
        raise InputError(f"{kind} {taken!r} exists already; expected another name")
