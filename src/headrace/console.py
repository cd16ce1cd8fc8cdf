"""What the commands share: a terminal, an end by Ctrl-C or SIGTERM, and a sentence where a package is missing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated

import typer
from rich.console import Console

from .errors import InputError
from .processes import Terminated, terminable

AcceptOld = Annotated[
    bool, typer.Option("--accept-old", help="Go on with results that another version made; the report says so.")
]


def terminal() -> Console:
    """Wide where the output goes to a file, so that no table is cut."""
    return Console() if sys.stdout.isatty() else Console(width=140)


@contextmanager
def interruptible(farewell: str) -> Iterator[None]:
    """Ctrl-C ends with the farewell and exit code 130, SIGTERM with 143: what follows must not take it for the end."""
    try:
        with terminable():
            yield
    except KeyboardInterrupt as stop:
        what, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        print(f"\n{what}: {farewell}", file=sys.stderr)
        raise typer.Exit(code) from None


def needing(extra: str, name: str, command: Callable) -> Callable:
    """The command of this name, which ends with an InputError where a package of the extra is not there."""

    @wraps(command)
    def run(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except ImportError as error:
            if (package := missing(error)) is None:
                raise
            raise InputError(
                f'{name} needs {package}, which is not installed: pip install "headrace[{extra}]"'
            ) from error

    return run


def missing(error: BaseException | None) -> str | None:
    """The package that could not be imported, also where transformers says so in an ImportError of its own."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(__package__):
            return error.name.partition(".")[0]
        if "requires `accelerate" in str(error):
            return "accelerate"
        error = error.__cause__ or error.__context__
    return None
