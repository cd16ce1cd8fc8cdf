"""What the programs share: options, the log of their rows, and tables on the terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from record import Row, append, environment

Output = Annotated[Path, typer.Option(help="The CSV file to append to.")]
Quick = Annotated[bool, typer.Option(help="Small shapes and few rounds: does everything run?")]
console = Console(width=None if Console().is_terminal else 160)


class Log:
    """The rows of one run of a program, which are appended to a file as they are measured."""

    def __init__(self, output: Path, device: str = "cpu"):
        self.output, self.about, self.rows = output, environment(device), list[Row]()

    def add(self, rows: Sequence[Row]) -> None:
        if rows:
            append(self.output, self.about, rows)
        self.rows += rows

    def end(self) -> None:
        about = f"{self.about['machine']}, {self.about['threads']} thread(s), {self.about['date']}"
        console.print(f"{len(self.rows)} rows appended to {self.output}; {about}")


def show(title: str, header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints a table; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)
