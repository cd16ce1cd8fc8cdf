"""HTML pages in one style: sections with a table, sentences and pictures, then the command and environment."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import ChoiceLoader, Environment, PackageLoader, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from ..files.environment import command
from ..files.provenance import sentence
from .style import INK, LINE, PALETTE, SOFT, STYLE

BROAD = 6.0  # width in inches from which a picture has a row of its own
VARIABLES = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)"} | {
    colour: f"var(--colour-{i})" for i, colour in enumerate(PALETTE)
}


@dataclass(frozen=True)
class Picture:
    """A picture of a page, as SVG whose colours and font are those of the page."""

    caption: str
    svg: Markup
    broad: bool


@dataclass(frozen=True)
class Name:
    """A cell with the name of a model and its colour in pictures; `title` is shown when the pointer is over it."""

    text: str
    colour: str
    title: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def variable(self) -> str:
        return VARIABLES.get(self.colour, self.colour)


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Args:
        about: paragraphs under the title.
        content: HTML before the table.
        header, rows: a table; without rows there is no table.
        sentences: findings or notes, of which those after the first `shown` are folded (None: none is).
        listing: preformatted text.
        details: a section that is folded under its title.
    """

    title: str = ""
    about: Sequence[str] = ()
    content: Markup | None = None
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    sentences: Sequence[str] = ()
    shown: int | None = None
    pictures: Sequence[Picture] = ()
    listing: str = ""
    details: "Section | None" = None


@dataclass(frozen=True)
class Page:
    """A page; `answer` is its main result in a sentence, `command` and `environments` say how it was made."""

    title: str
    about: Sequence[str]  # paragraphs
    sections: Sequence[Section]
    environments: Sequence[dict[str, Any]] = ()
    answer: str = ""
    command: str = field(default_factory=command)

    def write(self, path: Path) -> Path:
        """Writes the page to `path` atomically."""
        beside = path.with_name(f".{path.name}")
        html = template("page.html").render(page=self, palette=PALETTE, mixed=sentence(path.parent))
        beside.write_text(html, "utf-8")
        return beside.replace(path)


def template(name: str, package: str = "headrace.report") -> Template:
    """A template of a package, which can extend and include those of headrace.report."""
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader("headrace.report", ".")])
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.policies["json.dumps_kwargs"] = {"sort_keys": True, "allow_nan": False}  # a browser's JSON has no NaN
    return made.get_template(name)


def picture(caption: str, figure: Figure, path: Path) -> Picture:
    """Saves a figure as the PNG file `path`, and returns it as a picture of a page."""
    figure.savefig(path, bbox_inches="tight")
    return Picture(caption, svg(figure), figure.get_figwidth() > BROAD)


def svg(figure: Figure) -> Markup:
    """The figure with the colours and the font of the page, which differ between light and dark pages."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    drawn = file.getvalue()[file.getvalue().index("<svg") :].replace("'DejaVu Sans'", "system-ui")
    for colour, variable in VARIABLES.items():
        drawn = drawn.replace(colour, variable)
    return Markup(re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL))
