"""What the commands share: a terminal, and an end by Ctrl-C or SIGTERM."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from .errors import InputError
from .processes import Terminated, terminable


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


@contextmanager
def extra(command: str, name: str) -> Iterator[None]:
    """Around what a command imports. InputError where a package of the extra is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(
            f'{command} needs {error.name}, which is not installed: pip install "headrace[{name}]"'
        ) from None
