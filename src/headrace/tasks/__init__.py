"""What models are compared on. A task is a frozen record of literals: JSON-able, cheap to send to a worker."""

from .base import IGNORED, Answers, Metric, Rows, Task
from .dates import Dates
from .masked import Masked
from .mqar import Mqar
from .pair import Pair
from .reverse import Reverse
from .sequences import Sequences
from .text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (Pair, Mqar, Text, Masked, Reverse, Dates)}

__all__ = [
    "IGNORED", "TASKS", "Answers", "Dates", "Masked", "Metric", "Mqar", "Pair", "Reverse", "Rows", "Sequences", "Task",
    "Text",
]  # fmt: skip
