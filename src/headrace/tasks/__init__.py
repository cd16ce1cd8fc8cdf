"""What models are compared on. A task is a frozen record of literals: JSON-able, cheap to send to a worker."""

from .base import IGNORED, Answers, Metric, Rows, Task
from .dates import Dates
from .masked import Masked
from .mqar import Mqar
from .pair import Pair
from .reverse import Reverse
from .sequences import Sequences
from .spans import Spans
from .text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (Pair, Mqar, Text, Masked, Reverse, Dates, Spans)}

__all__ = [
    "IGNORED", "TASKS", "Answers", "Dates", "Masked", "Metric", "Mqar", "Pair", "Reverse", "Rows", "Sequences", "Spans",
    "Task", "Text",
]  # fmt: skip
