"""What the commands share: a terminal, and an end by Ctrl-C."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from .errors import InputError


def terminal() -> Console:
    """Wide where the output goes to a file, so that no table is cut."""
    return Console() if sys.stdout.isatty() else Console(width=140)


@contextmanager
def interruptible(farewell: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted: {farewell}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def extra(command: str, name: str) -> Iterator[None]:
    """Around what a command imports. InputError where a package of the extra is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(
            f'{command} needs {error.name}, which is not installed: pip install "headrace[{name}]"'
        ) from None
