"""The documentation site builds without a warning, every page of code ran, and no page loads anything from outside."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.main import get_command

from headrace import zoo
from headrace.cli.app import app

pytest.importorskip("sphinx", reason="Sphinx is not installed")
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTEBOOKS = [page for page in sorted(DOCS.rglob("*.md")) if "file_format: mystnb" in page.read_text("utf-8")]


class Page(HTMLParser):
    """The anchors of a page, its links, and the addresses of what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.anchors, self.links, self.assets, self.text = path, set(), [], [], ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        loads = tag in ("script", "img", "iframe", "source", "video") or (
            tag == "link" and "canonical" not in given.get("rel", "")
        )
        self.assets += [given[name] for name in ("src", "href", "srcset") if loads and given.get(name)]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a fresh build. The outputs of a page may come from build/notebooks if neither the page nor the
    library has changed since (docs/conf.py)."""
    folder = tmp_path_factory.mktemp("docs")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-d",
        folder / "trees",
        DOCS,
        folder / "site",
    ]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": ""})
    assert found.returncode == 0, found.stderr[-4000:]
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}


@pytest.mark.slow
def test_every_page_is_there(pages):
    sources = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    assert sources <= pages.keys()


@pytest.mark.slow
@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_every_cell_ran(site, page):
    executed = site.parent / "jupyter_execute" / page.relative_to(DOCS).with_suffix(".ipynb")
    cells = [cell for cell in json.loads(executed.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == page.read_text("utf-8").count("\n```{code-cell}") > 0
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        failed = [out["ename"] for out in cell["outputs"] if out["output_type"] == "error"]
        expected = "raises-exception" in cell["metadata"].get("tags", [])
        assert bool(failed) == expected and set(failed) <= {"InputError"}, cell["source"]


@pytest.mark.slow
def test_links_lead_somewhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or (link.startswith("#") and name in ("genindex.html", "search.html")):
                continue
            path = (page.path.parent / unquote(target.path)).resolve() if target.path else page.path
            assert path.is_file(), f"{name}: {link}"
            if target.fragment and path.suffix == ".html":
                anchors = pages[path.relative_to(site.resolve()).as_posix() if target.path else name].anchors
                assert unquote(target.fragment) in anchors, f"{name}: {link}"


@pytest.mark.slow
def test_no_page_loads_anything_from_outside(site, pages):
    for name, page in pages.items():
        for asset in page.assets:
            assert not urlsplit(asset).netloc, f"{name}: {asset}"
            if urlsplit(asset).path and not asset.startswith("data:"):
                assert (page.path.parent / unquote(urlsplit(asset).path)).is_file(), f"{name}: {asset}"
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import\s)['\"]?(?:https?:)?//", sheet.read_text("utf-8")), sheet.name
    assert (site / "_static/mathjax/output/chtml/fonts/woff-v2").is_dir()


@pytest.mark.slow
def test_generated_pages_are_complete(pages):
    for name in zoo.names():
        assert name in pages["cheatsheet.html"].text, name
    for command in get_command(app).commands.values():
        text = pages["reference/cli.html"].text
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert f"headrace {command.name}" in text and all(option in text for option in options), command.name


def test_the_gallery_has_every_law():
    from studies.theory import EXPERIMENTS

    gallery = (DOCS / "gallery.md").read_text("utf-8")
    assert all(f'law("{name}")' in gallery or f"studies.theory {name}`" in gallery for name in EXPERIMENTS)
