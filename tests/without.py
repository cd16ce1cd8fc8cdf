"""A plug-in of pytest that hides installed packages from every import, as if they were not installed:

HEADRACE_WITHOUT=peft,openai python -m pytest -p without
"""

import importlib.machinery
import os
import sys

HIDDEN: set[str] = set()
_find = importlib.machinery.PathFinder.find_spec


def _find_spec(cls, name, *where):
    return None if name.partition(".")[0] in HIDDEN else _find(name, *where)


importlib.machinery.PathFinder.find_spec = classmethod(_find_spec)  # type: ignore[assignment]


def hide(names):
    """Hides these packages, and no other."""
    HIDDEN.clear()
    HIDDEN.update(names)
    for name in [name for name in sys.modules if name.partition(".")[0] in HIDDEN]:
        del sys.modules[name]  # what PyTorch imports if it is there


hide(os.environ.get("HEADRACE_WITHOUT", "").split(","))
