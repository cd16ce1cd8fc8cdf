"""The plug-ins of the page on mixers of your own, and a process that forgets them."""

import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from headrace import zoo
from headrace.comparison.defaults import DEFAULTS
from headrace.spec.serialize import TYPES
from headrace.tasks import TASKS
from headrace.utils import plugins
from headrace.utils.plugins import FILE, VARIABLE

PAGE = (Path(__file__).parents[1] / "docs" / "own-mixer.md").read_text("utf-8")
WRITTEN = dict(re.findall(r"%%writefile (\S+)\n(.*?)```", PAGE, re.DOTALL))
FILES = {name: text for name, text in WRITTEN.items() if "headrace.register" in text}
COMMANDS = re.findall(r"^headrace (.*)$", PAGE, re.MULTILINE)
NEW = (zoo.TABLES, *zoo.TABLES.values(), zoo.MODELS, TASKS, DEFAULTS, TYPES, plugins.LOADED, os.environ)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the plug-ins of the page, which is the current one. What they register is forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        for table in NEW:
            stack.enter_context(patch.dict(table))
        stack.enter_context(patch.object(plugins, "REGISTERED", []))
        yield tmp_path
        forget()


def forget():
    """Makes this process like one that has loaded no plug-in."""
    for name in [name for name in sys.modules if name.startswith(FILE)]:
        del sys.modules[name]
    for table in (TYPES, *zoo.TABLES.values(), zoo.MODELS, TASKS, DEFAULTS):
        for name in ("module:leaky", "leaky", "fading-delta", "fading-hybrid", "majority", "mine"):
            table.pop(name, None)
    plugins.LOADED.clear()
    plugins.REGISTERED.clear()
    os.environ.pop(VARIABLE, None)
