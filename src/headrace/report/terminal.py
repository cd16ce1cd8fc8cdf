"""Pages on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from .page import Page, Section


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
    for sentence in section.sentences[: section.shown]:
        say(console, f"- {sentence}")
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
