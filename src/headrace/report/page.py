"""A page in the house look: sections of sentences, a table and pictures, and at its end what made it."""

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
    caption: str
    png: str  # base64


@dataclass(frozen=True)
class Section:
    """header and rows are a table; without rows there is none."""

    title: str = ""
    about: str = ""
    sentences: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Page:
    title: str
    about: str
    sections: Sequence[Section]
    command: str
    environments: Sequence[dict[str, Any]] = ()

    def write(self, path: Path) -> Path:
        """Whole or not at all."""
        beside = path.with_name(f".{path.name}")
        beside.write_text(template("page.html").render(page=self, mixed=sentence(path.parent)), "utf-8")
        return beside.replace(path)


def template(name: str, package: str = "headrace.report") -> Template:
    """A file of a package, or of this one, which it may extend and include."""
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader("headrace.report", ".")])
    return Environment(loader=loader, autoescape=True, trim_blocks=True).get_template(name)


def picture(caption: str, figure: Figure, path: Path) -> Picture:
    """A figure as a file and as part of a page."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    path.write_bytes(drawn.getvalue())
    return Picture(caption, base64.b64encode(drawn.getvalue()).decode())
