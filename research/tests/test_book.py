"""The pages are built without a warning, and every law is drawn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="Sphinx is not installed")

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow(seconds=60)
def test_pages_are_built_without_warnings(tmp_path):
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "doctrees"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path / "site"], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-4000:]
    for page in ("softmax-linear-attention", "one-recurrence", "recurrence-to-attention"):
        drawn = re.findall(r"^(?:law|reached)\(", (DOCS / f"{page}.md").read_text("utf-8"), re.MULTILINE)
        assert (tmp_path / "site" / f"{page}.html").read_text("utf-8").count('src="_images/') >= len(drawn) > 0
