"""Sphinx configuration of the research pages: the library's, with pages of its own."""

import sys
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(LIBRARY))

from conf import *  # noqa: E402, F403
from conf import kept_outputs  # noqa: E402

project = html_title = "headrace research"
html_static_path = [str(LIBRARY / "_static")]
nb_execution_cache_path = kept_outputs("src", "native", "research")
