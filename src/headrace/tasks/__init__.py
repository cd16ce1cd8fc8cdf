"""What models are compared on. A task is a frozen record of literals: JSON-able, cheap to send to a worker."""

from .base import IGNORED, Metric, Rows, Task
from .mqar import Mqar
from .pair import Pair
from .text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (Pair, Mqar, Text)}

__all__ = ["IGNORED", "TASKS", "Metric", "Mqar", "Pair", "Rows", "Task", "Text"]
