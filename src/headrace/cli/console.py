"""What the commands share: the terminal, progress, interruption, and the check for missing packages."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from ..files.checks import decode
from ..files.processes import Terminated, terminable
from ..spec.record import LARGEST
from ..utils import extras
from ..utils.errors import InputError, require

T = TypeVar("T")
HEARTBEAT = 60.0  # seconds without a line after which the current line is repeated


def printable(text: str) -> str:
    """Returns the text with control characters as escapes: a name in a file could move the cursor or hide a line."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def terminal() -> Console:
    """A console for standard output, 140 columns wide if the output is a file, so that tables are not cut. It prints
    "[a]" in names as it is, which Rich takes for markup."""
    return Console(markup=False, width=None if sys.stdout.isatty() else 140)


@contextmanager
def telling(console: Console) -> Iterator[Callable[[str], None]]:
    """Yields `tell(line)`, which shows the current activity.

    On a terminal, the line replaces the previous one. Elsewhere it is printed, and printed again with the elapsed
    minutes after every HEARTBEAT seconds."""
    if console.is_terminal:
        with console.status("") as status:
            yield lambda line: status.update(escape(line))
        return
    current: list[Any] = ["", 0.0]
    ended = threading.Event()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def tell(line: str) -> None:
        current[:] = line, time.monotonic()
        say(line)

    def repeat() -> None:
        while not ended.wait(HEARTBEAT):
            line, since = current
            if line and time.monotonic() - since >= HEARTBEAT:
                say(f"{line}: at work for {(time.monotonic() - since) / 60:.0f} min")

    threading.Thread(target=repeat, daemon=True).start()
    try:
        yield tell
    finally:
        ended.set()


def track(items: Sequence[T], name: str, tell: Callable[[str], None]) -> Iterator[T]:
    """Iterates over the items and tells the position of each: "layer 2 of 5"."""
    for i, item in enumerate(items, 1):
        tell(f"{name} {i} of {len(items)}")
        yield item


class Interrupted(KeyboardInterrupt):
    """A command that Ctrl-C or SIGTERM ended, after its farewell. args: the exit code."""


@contextmanager
def interruptible(farewell: str, terminated: int = 143) -> Iterator[None]:
    """Prints a farewell after Ctrl-C and SIGTERM, and raises Interrupted with exit code 130 or `terminated`."""
    try:
        with terminable():
            yield
    except KeyboardInterrupt as stop:
        what, code = ("terminated", terminated) if isinstance(stop, Terminated) else ("interrupted", 130)
        print(f"\n{what}: {farewell}", file=sys.stderr)
        raise Interrupted(code) from None


def numbers(option: str, text: str) -> list[int]:
    """Parses "512,2048". Raises InputError, with the option's name, for anything but distinct positive integers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 20 and 1 <= int(part) < LARGEST for part in parts):
        expected = "positive integers of less than 2^31 separated by commas, such as 512,2048"
        raise InputError(f"--{option}={text}; expected {expected}")
    values = [int(part) for part in parts]
    require(len(set(values)) == len(values), f"--{option}={text} has a number twice; expected each once")
    return values


def refuse_idle(why: str, **options: Any) -> None:
    """Raises InputError for the first option that is given, as none has an effect. why: such as "without --task"."""
    if idle := next((name for name, value in options.items() if value is not None and value is not False), None):
        raise InputError(f"--{idle.replace('_', '-')} has no effect {why}")


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Returns the prompt, or the content of the file, or all of standard input.

    Raises InputError if both or none are given, and for one that is not UTF-8 or cannot be read."""
    require(prompt is None or file is None, "--prompt and --file are both given; expected one of them")
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):  # None: it was closed
        raise InputError("--prompt is missing; expected --prompt, --file, or text on standard input")
    name = "--prompt" if prompt is not None else "standard input" if file is None else f"--file {str(file)!r}"
    try:
        if prompt is not None:  # Python has kept bytes that are not UTF-8 as surrogates
            data = prompt.encode("utf-8", "surrogateescape")
        else:
            data = file.read_bytes() if file else sys.stdin.buffer.read()
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    text = decode(data, name)
    return text if prompt is not None else StringIO(text, newline=None).read()  # every line ends in \n


@contextmanager
def needing(extra: str | None, name: str) -> Iterator[None]:
    """Raises an InputError that names the extra to install for a package that is not installed.

    The packages of the command's own extra are looked for before the block; those that only some of its options need,
    when an import fails in it."""
    extras.require_packages(name, *(extras.packages(extra) if extra else ()), extra=extra)
    try:
        yield
    except ImportError as error:
        extras.explain(name, error)
        raise
