"""The description of a task in a report: its text, an example row as tokens with roles, and the score of guessing."""

import inspect
import math
import string
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch

from ... import tasks
from ...tasks.base import ByRow
from ...tasks.digits import GREYS
from .summary import show

ROLES = ("key", "value", "query", "filler")  # those named in the legend, in its order
LONGEST = {"filler": 8, "text": 48}  # role -> largest number of consecutive tokens that are drawn; RUN for others
RUN = 24
LETTERS = list(string.ascii_lowercase)
# task -> its tokens after the symbols
MARKS: dict[type, str] = {tasks.Copy: "|", tasks.Induction: "!", tasks.SelectiveCopy: ".?"}
SPECIAL = ("[CLS]", "[SEP]", "[MASK]")


class Token(NamedTuple):
    """One position: its parts (text, role) and the expected answer. Roles: key, value, query, filler, text."""

    parts: list[tuple[str, str]]
    answer: str | None = None

    @property
    def role(self) -> str:
        return self.parts[0][1]


def about(task: Any) -> str:
    """The first paragraph of the task's module."""
    module = inspect.getmodule(type(task))
    return " ".join((module.__doc__ or "").split("\n\n")[0].split()) if module else ""


def guessing(task: Any) -> str:
    """A sentence with the score of uniform guesses."""
    if task.metric.name == "loss":
        score = math.log(task.vocab_size)
    elif isinstance(task, ByRow) and task.metric is ByRow.metric:
        return "Uniform guesses are almost never right on a whole target: chance is about 0 %."
    else:
        score = getattr(task, "chance", 1 / task.vocab_size)
    return f"Uniform guesses score {show(task.metric, score)}."


def example(task: Any) -> list[Token | int]:
    """A held-out row as tokens; an int n in the list replaces n tokens of a long run of one role."""
    drawn: list[Token | int] = []
    for role, run in groupby(tokens(task), key=lambda token: token.role):
        whole = list(run)
        limit = LONGEST.get(role, RUN)
        drawn += whole if len(whole) <= limit + 2 else [*whole[:limit], len(whole) - limit]
    return drawn


def tokens(task: Any) -> Iterator[Token]:
    row = {name: values[0] for name, values in task.held_out(1).items()}
    ids, labels = row["input_ids"], row["shift_labels"]
    if isinstance(task, tasks.Sequences):
        yield from (Token([(visible(text), "value")]) for text in task.text(ids))
        yield from (Token([("?", "query")], visible(text)) for text in task.text(labels))
        return
    for t, (label, at) in enumerate(zip(labels.tolist(), ids, strict=True)):
        parts = [i for i in torch.atleast_1d(at).tolist() if i >= 0]
        asked = label != tasks.IGNORED
        yield Token(
            [(visible(text(task, i)), role(task, t + channel, i, ids, asked)) for channel, i in enumerate(parts)],
            visible(text(task, label)) if asked else None,
        )


def visible(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def text(task: Any, i: int) -> str:
    match task:
        case tasks.Pair() | tasks.KeyValue():
            return f"k{i}" if i < task.keys else f"v{i - task.keys}"
        case tasks.Mqar():
            half = task.vocabulary // 2
            return f"k{i}" if i < half else f"v{i - half}"
        case tasks.Copy() | tasks.Induction() | tasks.SelectiveCopy():
            symbols = LETTERS[: task.symbols] + [str(n) for n in range(len(LETTERS), task.symbols)]
            return [*symbols, *MARKS[type(task)]][i]
        case tasks.Digits():
            return str(i - GREYS if i >= GREYS else i)
        case tasks.Needle():
            return task.tokens.decode([i])
        case tasks.Masked() if i >= task.corpus.vocab_size:
            return SPECIAL[i - task.corpus.vocab_size]
        case tasks.Text() if task.tokenizer is not None:
            from tokenizers import Tokenizer

            return str(Tokenizer.from_file(task.tokenizer).id_to_token(i))
        case _:
            return chr(i) if i < 128 else f"\\x{i:02x}"  # a byte of a longer character


def role(task: Any, t: int, i: int, ids: torch.Tensor, asked: bool) -> str:
    """The role of token i at position t of the row `ids`; `asked`: whether the position has a label."""
    match task:
        case tasks.Text() | tasks.Digits():
            return "text"
        case _ if asked:
            return "query"
        case tasks.Pair():
            return "key" if i < task.keys else "value"
        case tasks.KeyValue() | tasks.Mqar():
            return ("key", "value")[t % 2] if t < 2 * task.pairs else "filler"
        case tasks.Induction():
            mark = int((ids == task.symbols).nonzero()[0])
            return {mark: "key", mark + 1: "value"}.get(t, "filler")
        case tasks.Copy() | tasks.SelectiveCopy():
            return "value" if i < task.symbols else "filler"
        case _:
            return "filler"
