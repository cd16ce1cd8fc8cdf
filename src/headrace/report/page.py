"""Pages in one style, as HTML and on the terminal: sections with a table, sentences and pictures, then the command and
environment."""

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
from rich.console import Console
from rich.table import Table

from ..files.environment import command
from ..files.provenance import sentence
from ..utils.integrity import atomic

# Colours, those of style.css, and matplotlib settings of all pictures.
PALETTE = (
    "#2f6f9f", "#d1495b", "#c98a1b", "#3a8f6b", "#7b5ea7", "#8c6d46", "#d07ab5", "#6c757d", "#8f9d1f", "#35a0b4",
    "#e07b39", "#5b7fd4",
)  # fmt: skip
STYLE: Any = matplotlib.rc_params_from_file(Path(__file__).with_name("pictures.mplstyle"), use_default_template=False)
INK, SOFT, LINE = (STYLE[name] for name in ("text.color", "axes.edgecolor", "grid.color"))
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
        sentences: findings or notes; those after the first `shown` are folded (None: none).
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
        html = template("page.html").render(page=self, palette=PALETTE, mixed=sentence(path.parent))
        with atomic(path) as file:
            file.write(html)
        return path


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


# --- the terminal ----------------------------------------------------------------------------------------------------
def print_sections(page: Page, console: Console) -> None:
    """Prints a page without its pictures."""
    if page.answer:
        say(console, page.answer, style="bold")
    for section in (Section(about=page.about), *page.sections):
        print_section(section, console)


def print_section(section: Section, console: Console) -> None:
    """Prints what a section says, its table and its first sentences; not its details."""
    for paragraph in filter(None, section.about):
        say(console, paragraph)
    if section.rows:
        console.print(table(section))
    for finding in section.sentences[: section.shown]:
        say(console, f"- {finding}")
    if more := section.sentences[section.shown :] if section.shown else ():
        say(console, f"({len(more)} more in the report)")


def table(section: Section) -> Table:
    drawn = Table(title=section.title, title_justify="left", title_style="bold")
    for i, column in enumerate(section.header):
        drawn.add_column(column, justify="right" if i else "left")
    for row in section.rows:
        drawn.add_row(*map(str, row))
    return drawn


def say(console: Console, sentence: str, **style: Any) -> None:
    console.print(sentence, highlight=False, soft_wrap=True, markup=False, **style)
