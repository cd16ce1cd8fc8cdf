"""What the commands share: a terminal, and an end by Ctrl-C."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console


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
