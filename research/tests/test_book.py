"""The pages are built without a warning, and every law of the page on theory is drawn."""

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
    laws = (DOCS / "theory.md").read_text("utf-8").count('\nlaw("')
    assert (tmp_path / "site" / "theory.html").read_text("utf-8").count('src="_images/') >= laws > 0
