"""The commands that look at what models and memories do."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table


def lab(
    name: Annotated[str | None, typer.Argument(help="An experiment, or all; a list of them without it.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for NAME.png and NAME.json.")] = Path("runs/lab"),
    seed: Annotated[int, typer.Option(help="Of the random keys and values.", min=0, max=2**32)] = 0,
) -> None:
    """Theory as laws and pictures: what is seen against what the law says. Exit code 1 where a law does not hold."""
    from .errors import InputError

    try:
        from . import lab as laboratory
    except ModuleNotFoundError as error:
        raise InputError(f'lab needs {error.name}, which is not installed: pip install "headrace[models]"') from None

    console, broken = Console(), 0
    if name is None:
        table = Table("experiment", "what it shows")
        for known in laboratory.EXPERIMENTS:
            table.add_row(known, laboratory.about(known))
        console.print(table)
        return
    for known in laboratory.chosen(name):
        finding = laboratory.experiment(known, seed)
        picture = laboratory.save(known, seed, finding, output)
        broken += sum(not row.holds for row in finding.rows)
        table = Table("law", "seen", "", "the law says", "", title=known, title_justify="left")
        for row in finding.rows:
            mark = "holds" if row.holds else "[red]BROKEN"
            table.add_row(row.law, f"{row.seen:.3g}", row.relation, f"{row.bound:.3g}", mark)
        console.print(table)
        console.print(f"{finding.sentence}\nThe picture is {picture}\n", soft_wrap=True, highlight=False)
    raise typer.Exit(1 if broken else 0)


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A folder written by `train` or save_pretrained.")],
    text: Annotated[str | None, typer.Option(help="What the model reads; standard input without it.")] = None,
    file: Annotated[Path | None, typer.Option(help="The same, from a file of UTF-8.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Cut the text after so many; without it, 2,000 at most.")] = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("inspect.html"),
) -> None:
    """What a model does with a text, token by token, as one interactive page: gates, horizons, effective attention."""
    from .errors import InputError

    try:
        from . import inspection
    except ModuleNotFoundError as error:
        raise InputError(
            f'inspect needs {error.name}, which is not installed: pip install "headrace[models]"'
        ) from None

    progress = partial(track, description="layers", console=Console(stderr=True), transient=True)
    page = inspection.inspect(checkpoint, inspection.read_text(text, file), tokens, progress)
    inspection.write(page, output)
    print(f"{output}: {len(page.encode()) / 1e6:.1f} MB; open it in a browser")
