"""HTML pages in one style: sections with sentences, a table and pictures, then the command and environment."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, Template
from matplotlib.figure import Figure

from ..utils.provenance import sentence


@dataclass(frozen=True)
class Picture:
    """A picture of a page."""

    caption: str
    png: str  # base64


@dataclass(frozen=True)
class Section:
    """A section of a page. `header` and `rows` make a table; a section without rows has no table."""

    title: str = ""
    about: str = ""
    sentences: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Page:
    """A page; `command` and `environments` say how its numbers were made."""

    title: str
    about: str
    sections: Sequence[Section]
    command: str
    environments: Sequence[dict[str, Any]] = ()

    def write(self, path: Path) -> Path:
        """Writes the page to `path` atomically."""
        beside = path.with_name(f".{path.name}")
        beside.write_text(template("page.html").render(page=self, mixed=sentence(path.parent)), "utf-8")
        return beside.replace(path)


def template(name: str, package: str = "headrace.report") -> Template:
    """A template of a package, which can extend and include those of headrace.report."""
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader("headrace.report", ".")])
    return Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(name)


def picture(caption: str, figure: Figure, path: Path) -> Picture:
    """Saves a figure as the PNG file `path`, and returns it as a picture of a page."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    path.write_bytes(drawn.getvalue())
    return Picture(caption, base64.b64encode(drawn.getvalue()).decode())
