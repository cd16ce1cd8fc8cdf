"""The tasks that a plug-in or a program adds, known from then on like those of headrace."""

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from ..extra.registration import check_name
from ..utils import plugins
from ..utils.errors import InputError
from ..utils.extras import require_packages


def register_task(
    name: str, task: Any, mixers: Sequence[str] = ("gla", "softmax-gla", "transformer"), **settings
) -> None:
    """Adds a task to those of `headrace compare` and `headrace prepare`.

    Args:
        name: its name.
        task: an instance of a frozen dataclass with the protocol of `headrace.tasks.Task`. The values of its fields are
            the task's defaults. The docstring of its class describes it in reports.
        mixers: the mixers that are compared by default, in a list, or in a text with commas.
        settings: defaults of a comparison that differ from those of `pair`: fields of the model (`layers`, `heads`,
            `hidden_size`, `mlp`) and of its training (`steps`, `batch_size`, `lr`, ...).

    Raises:
        InputError: for a name that exists already or is not a valid name, and for a task that lacks something that a
            comparison needs.
    """
    require_packages("register_task", "transformers")
    from ..tasks import TASKS
    from ..tasks.check import check_task
    from .defaults import DEFAULTS, plan

    check_name("task", name, TASKS.__contains__)
    if is_dataclass(type(task)) and "name" not in vars(type(task)):
        type(task).name = name
    if getattr(task, "name", name) != name:
        raise InputError(f"task {name!r} has the name {task.name!r} in its class; expected the same, or none")
    check_task(name, task)
    TASKS[name], DEFAULTS[name] = type(task), plan(task, mixers, **settings)
    plugins.note_registration((TASKS, name), (DEFAULTS, name))
