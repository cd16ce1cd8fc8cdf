"""The documentation site builds without a warning, every page of code ran, and no page loads anything from outside."""

import json
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

import generated
import parts

from headrace.ops.dispatch import unavailable
from headrace.spec.linear import MixerSpec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = [
    page for page in sorted(DOCS.rglob("*.md")) if page.read_text("utf-8").startswith("---\nfile_format: mystnb")
]


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


@pytest.mark.slow(seconds=100)
def test_site_builds_without_warnings_or_external_assets(tmp_path):
    """One build for all checks. The outputs of a page may come from build/notebooks if neither the page nor the library
    has changed since (docs/conf.py)."""
    site = tmp_path / "site"
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "doctrees"]
    built = subprocess.run([sys.executable, "-m", "sphinx", *options, DOCS, site], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    pages = {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}
    sources = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    assert sources <= pages.keys()
    for page in NOTEBOOKS:
        name = page.relative_to(DOCS)
        shown = " ".join(pages[name.with_suffix(".html").as_posix()].text.split())
        every_cell_ran(page, tmp_path / "jupyter_execute" / name.with_suffix(".ipynb"), shown)
    links_lead_somewhere(site, pages)
    nothing_comes_from_outside(site, pages)
    generated_pages_are_complete(pages)


def every_cell_ran(page, executed, shown):
    """A run numbers its cells from 1. Sphinx copies a page with kept outputs without numbers and outputs; the kept run
    has them. shown: the text of the page in the site."""
    cells = code_cells(executed)
    sources = [cell["source"] for cell in cells]
    assert len(cells) == page.read_text("utf-8").count("\n```{code-cell}") > 0, page
    kept = [code_cells(path) for path in (ROOT / "build" / "notebooks").glob("*/executed/*/base.ipynb")]
    runs = [run for run in [cells, *kept] if [cell["source"] for cell in run] == sources and numbers(run)[0]]
    ran = next((run for run in runs if all(" ".join(error["evalue"].split()) in shown for error in errors(run))), [])
    assert numbers(ran) == list(range(1, len(cells) + 1)), page
    for cell in ran:
        expected = "raises-exception" in cell["metadata"].get("tags", [])
        assert [error["ename"] for error in errors([cell])] == ["InputError"] * expected, f"{page}: {cell['source']}"


def code_cells(notebook):
    return [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def numbers(cells):
    return [cell["execution_count"] for cell in cells]


def errors(cells):
    return [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]


def links_lead_somewhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or (link.startswith("#") and name in ("genindex.html", "search.html")):
                continue
            path = (page.path.parent / unquote(target.path)).resolve() if target.path else page.path.resolve()
            assert path.is_file(), f"{name}: {link}"
            if target.fragment and path.suffix == ".html":
                anchors = pages[path.relative_to(site.resolve()).as_posix()].anchors
                assert unquote(target.fragment) in anchors, f"{name}: {link}"


def nothing_comes_from_outside(site, pages):
    """What a page loads is a file of the site."""
    for name, page in pages.items():
        for address in map(urlsplit, page.assets):
            assert not address.netloc and address.scheme in ("", "data"), f"{name}: {address.geturl()}"
            local = address.scheme == "data" or not address.path or (page.path.parent / unquote(address.path)).is_file()
            assert local, f"{name}: {address.geturl()}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s)['\"]?(?:https?:)?//", sheet.read_text("utf-8")), sheet.name
    assert list((site / "_static/mathjax/output/chtml/fonts/woff-v2").glob("*.woff"))


def generated_pages_are_complete(pages):
    listed = set(pages["mixers.html"].text.split())
    assert not [name for name in zoo.names() if not {name, name.removeprefix("softmax-")} & listed]
    text = pages["reference.html"].text
    for command in get_command(app).commands.values():
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        missing = [option for option in (f"headrace {command.name}", *options) if option not in text]
        assert not missing, f"{command.name}: {missing}"


def test_every_page_shows_a_picture():
    for page in DOCS.glob("*.md"):
        assert "](_static/" in (text := page.read_text("utf-8")) or ":file: _static/" in text, page.name


def test_picture_of_mixers_has_every_linear_mixer():
    """`python docs/pictures.py mixers` draws it."""
    drawn = set(re.findall(r">([\w-]+)</text>", (DOCS / "_static" / "mixers.svg").read_text("utf-8")))
    assert {name for name in generated.plain() if isinstance(zoo.get(name), MixerSpec)} <= drawn


@pytest.mark.parametrize("before", ["", "A list:\n", "- An item of\n  "])
def test_a_part_in_a_sentence_does_not_begin_a_line(before):
    """Markdown takes such a line for HTML, and shows the rest of it as it is written."""
    page = f"{before}<!-- generated: number -->1<!-- end --> of **two**\n"
    with pytest.raises(ValueError, match="begins a line"):
        parts.filled(page, "generated", lambda *_: "2")
    assert parts.filled(f"{before}See {page[len(before) :]}", "generated", lambda *_: "2").count(">2<") == 1


@pytest.mark.parametrize("page", generated.pages(), ids=lambda page: page.stem)
def test_generated_parts_of_pages_are_current(page):
    if page.stem == "faq" and unavailable("native", "linear_attention"):
        pytest.skip("its answers are those of an installation with native kernels")
    old = parts.outdated(page, generated.filled(page.read_text("utf-8")))
    assert old is None, f"{old}: `make generated` writes it"
