"""The pages are built without a warning, and every law is drawn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="Sphinx is not installed")

DOCS = Path(__file__).parents[1] / "docs"


def test_outputs_of_pages_are_kept_until_rows_change(tmp_path):
    """A page may draw what rows say: `reached` of research/theory/page.py."""
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import conf; conf.ROOT = pathlib.Path(sys.argv[2])\n"
        "for rows in 'aab': (conf.ROOT / 'rows.csv').write_text(rows); print(conf.kept_outputs('.'))"
    )
    command = [sys.executable, "-c", program, DOCS.parents[1] / "docs", tmp_path]
    first, again, changed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first == again != changed


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
