"""What a task must have for a comparison, checked before training, and its description for a report."""

import inspect
import json
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from textwrap import dedent
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..ops.loss import IGNORED
from ..utils.errors import InputError, reading, require
from .base import Answers, Batch, Metric, Task, row_hashes
from .sequences import Sequences

ROWS = 1024  # training rows that are compared with rows held out
MEMBERS = ("metric", "vocab_size", "length", "resized", "training", "held_out", "by_length", "scores")
SHOWN = 16  # positions of an example row


def check_task(name: str, task: Any) -> None:
    """Raises InputError unless a task has everything that a comparison needs: a description, fields that JSON and other
    processes can take, rows, labels, a metric, and held-out rows that are not trained on."""
    with reading(f"task {name!r} cannot be used"):
        wrong = next(_objections(task), None)
    require(not wrong, f"task {name!r} {wrong}")


def _objections(task: Any) -> Iterator[str]:
    kind = type(task)
    if not is_dataclass(task) or isinstance(task, type):
        yield f"is {task!r}; expected an instance of a frozen dataclass"
    if missing := next((member for member in MEMBERS if not hasattr(task, member)), None):
        yield f"has no {missing!r}; expected the members of headrace.tasks.Task ({', '.join(MEMBERS)})"
    if (kind.__dict__.get("__doc__") or f"{kind.__name__}(").startswith(f"{kind.__name__}("):
        yield f"has no description; expected a docstring of its class {kind.__name__}"
    if not isinstance(task.metric, Metric):
        yield f"has metric={task.metric!r}; expected a headrace.tasks.Metric"
    hash(task)
    values = {field: list(value) if isinstance(value, tuple) else value for field, value in asdict(task).items()}
    if values != json.loads(json.dumps(values)):
        yield f"has the fields {asdict(task)}; expected numbers, texts and tuples of them"
    if pickle.loads(pickle.dumps(task)) != task:
        yield "differs from its copy in another process; expected a class at the top of its module"
    for what in ("vocab_size", "length"):
        if type(size := getattr(task, what)) is not int or size < 1:
            yield f"has {what}={size!r}; expected a positive integer"
    with suppress(InputError):  # of a task with one length
        if type(other := task.resized(task.length)) is not kind or other.length != task.length:
            yield f"resized({task.length}) gives {other}; expected the same task at that length"
    yield from _objections_to_rows(task)


def _objections_to_rows(task: Task) -> Iterator[str]:
    training, held_out, tuning = sample(task), task.held_out(64), task.held_out(64, "tuning")
    longer = [rows for length, rows in task.by_length(4).items() if length != task.length]
    for what, rows in {"training": training, "held-out": held_out, "tuning": tuning}.items():
        yield from (f"has {what} rows with {wrong}" for wrong in _wrong_rows(task, rows))
    if len(training["input_ids"]) != ROWS or not len(held_out["input_ids"]) or not len(tuning["input_ids"]):
        counts = [len(rows["input_ids"]) for rows in (training, held_out, tuning)]
        yield f"has {counts} training, held-out and tuning rows; expected {ROWS}, and at least 1 of the others"
    for what, again, rows in (("training", sample(task), training), ("held_out", task.held_out(64), held_out)):
        if any(not torch.equal(rows[name], again[name]) for name in rows):
            yield f"gives other rows at the second call of {what}; expected rows that its generator alone decides"
    for what, rows in {"held-out": held_out, "tuning": tuning}.items():
        others = [training, *longer] if what == "tuning" else [training, tuning]
        if shared := sum(int(np.isin(_hashes(task, rows), _hashes(task, other)).sum()) for other in others):
            yield f"has {shared} of {len(rows['input_ids'])} {what} rows in other parts; expected different rows"
    labels = held_out["shift_labels"]
    scores = task.scores(Answers(held_out, torch.zeros(labels.shape), labels != IGNORED))
    if not {task.metric.name, "loss"} <= scores.keys() or not all(isinstance(s, float) for s in scores.values()):
        yield f"has the scores {scores}; expected numbers, {task.metric.name!r} and 'loss' among them"


def sample(task: Task) -> Batch:
    rows = task.training(0, ROWS)
    return default_collate([rows[i] for i in range(ROWS)])


def _hashes(task: Task, rows: Batch) -> np.ndarray:
    content: Any = getattr(task, "content", lambda drawn: drawn["input_ids"])
    return row_hashes(content(rows) if isinstance(task, Sequences) else rows["input_ids"])


def _wrong_rows(task: Task, rows: Batch) -> Iterator[str]:
    names = {"input_ids", "shift_labels"} | ({"attention_mask"} if isinstance(task, Sequences) else set())
    if rows.keys() != names or not all(isinstance(values, Tensor) for values in rows.values()):
        yield f"{sorted(rows)}; expected tensors {sorted(names)}"
    ids, labels = rows["input_ids"], rows["shift_labels"]
    for what, values, dims in (("input_ids", ids, (2, 3)), ("shift_labels", labels, (2,))):
        if values.dim() not in dims or values.dtype != torch.long:
            yield f"{what} of shape {list(values.shape)} and {values.dtype}; expected torch.int64 [rows, T]"
        counted = values[values != IGNORED] if what == "shift_labels" else values
        low, high = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
        if low < (-1 if values.dim() == 3 else 0) or high >= task.vocab_size:
            yield f"{what} from {low} to {high}; expected 0 to {task.vocab_size - 1}, below vocab_size"
    if not isinstance(task, Sequences) and not ids.shape[1] == labels.shape[1] == task.length:
        yield f"input_ids {list(ids.shape)} and shift_labels {list(labels.shape)}; expected length={task.length}"
    if not (labels != IGNORED).any(1).all():
        yield "no label; expected a label in each row"


def description(task: Any) -> tuple[str, str, list[str]]:
    """Returns what a task is, an example row, and further paragraphs: those of `text` for a task of headrace, else
    those of its class's docstring and a held-out row."""
    if type(task).__module__.startswith("headrace."):
        about, row, *more = text(type(task)).split("\n\n")
        return about, dedent(row), more
    about, *more = (inspect.getdoc(type(task)) or "").split("\n\n")
    return about, example(task), more


def text(kind: type) -> str:
    """The docstring of a task of headrace: of its class, or of its module if the class's is one paragraph."""
    own = inspect.getdoc(kind) or ""
    return own if "\n\n" in own else inspect.getdoc(inspect.getmodule(kind)) or ""


def example(task: Any) -> str:
    """Returns the first positions of a held-out row as two lines."""
    row = {name: values[0, :SHOWN].tolist() for name, values in task.held_out(1).items()}
    ids = ["/".join("–" if i < 0 else str(i) for i in (x if isinstance(x, list) else [x])) for x in row["input_ids"]]
    labels = ["" if label == IGNORED else str(label) for label in row["shift_labels"]]
    width = max(map(len, [*ids, *labels]))
    lines = {"input ": ids, "answer": labels}
    joined = (f"{name}  {' '.join(cell.rjust(width) for cell in cells)}".rstrip() for name, cells in lines.items())
    return "\n".join(joined)
