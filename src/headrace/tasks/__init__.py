"""Tasks on which models are compared. A task is a frozen dataclass of literals, which can be stored as JSON."""

from ..utils.extras import require_packages

require_packages(__name__, "transformers")

from ..ops.loss import IGNORED
from .base import Answers, ByRow, ByToken, Drawn, Metric, Rows, Task
from .copying import Copy, Induction, SelectiveCopy
from .corruption import Masked, Spans
from .dates import Dates
from .digits import Digits
from .needle import Needle
from .pair import Pair
from .recall import KeyValue, Mqar
from .sequences import Reverse, Sequences
from .text import Text
from .tracking import S3, S5, Dyck, FlipFlop, ModularCounting, Parity

TASKS: dict[str, type[Task]] = {task.name: task for task in (
    Pair, KeyValue, Mqar, Copy, SelectiveCopy, Induction, Needle, Digits, Text, Masked, Reverse, Dates, Spans,
    Parity, ModularCounting, S3, S5, FlipFlop, Dyck,
)}  # fmt: skip

__all__ = [
    "IGNORED", "S3", "S5", "TASKS", "Answers", "ByRow", "ByToken", "Copy", "Dates", "Digits", "Drawn", "Dyck",
    "FlipFlop", "Induction", "KeyValue", "Masked", "Metric", "ModularCounting", "Mqar", "Needle", "Pair", "Parity",
    "Reverse", "Rows", "SelectiveCopy", "Sequences", "Spans", "Task", "Text",
]  # fmt: skip
