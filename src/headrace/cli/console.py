"""What the commands share: a terminal, an end by Ctrl-C or SIGTERM, and a sentence where a package is missing."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from ..utils.errors import InputError
from ..utils.processes import Terminated, terminable

T = TypeVar("T")
PATIENCE = 60.0  # seconds without a line
AcceptOld = Annotated[
    bool, typer.Option("--accept-old", help="Go on with results that another version made; the report says so.")
]


def terminal() -> Console:
    """Wide where the output goes to a file, so that no table is cut."""
    return Console() if sys.stdout.isatty() else Console(width=140)


@contextmanager
def telling(console: Console) -> Iterator[Callable[[str], None]]:
    """tell(what is at work now). On a terminal it stands until the next; elsewhere it is a line, which is said again
    with its minutes while it lasts."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    at: list[Any] = ["", 0.0]
    ended = threading.Event()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def tell(line: str) -> None:
        at[:] = line, time.monotonic()
        say(line)

    def again() -> None:
        while not ended.wait(PATIENCE):
            line, since = at
            if line:
                say(f"{line}: at work for {(time.monotonic() - since) / 60:.0f} min")

    threading.Thread(target=again, daemon=True).start()
    try:
        yield tell
    finally:
        ended.set()


def track(items: Sequence[T], name: str, tell: Callable[[str], None]) -> Iterator[T]:
    """The items, each told of: "layer 2 of 5"."""
    for i, item in enumerate(items, 1):
        tell(f"{name} {i} of {len(items)}")
        yield item


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
