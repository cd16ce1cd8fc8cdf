"""Errors and warnings about what a user provides."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class InputError(ValueError):
    """An invalid argument, file or checkpoint. The message is one sentence that names the argument, its value and what
    was expected. The command line prints the message and exits with code 2."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown name: "; did you mean 'lr'?", or nothing if none is like it."""
    near = difflib.get_close_matches(name, names, 1)  # type: ignore[type-var]
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: Any) -> str:
    """Returns what Python prints for a value, on one line of at most 80 characters."""
    text = " ".join(map(str.strip, repr(value).splitlines()))
    return text if len(text) <= 80 else f"{text[:79]}…"


def require(condition: object, message: str) -> None:
    """Raises InputError with the message unless the condition holds."""
    if not condition:
        raise InputError(message)


def require_each(holds: Callable[[Any], bool], expected: str, **values: Any) -> None:
    """Raises InputError for the first value for which the condition does not hold."""
    for name, value in values.items():
        if not holds(value):
            raise InputError(f"{name}={shown(value)}; expected {expected}")


@contextmanager
def panics_raised() -> Iterator[None]:
    """Raises a RuntimeError for a panic in a library that is written in Rust, as tokenizers and safetensors are, which
    no `except Exception` catches."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # PyO3's class, which cannot be imported
            raise
        raise RuntimeError(f"a library has panicked: {error}") from error


@contextmanager
def reading(sentence: str) -> Iterator[None]:
    """Raises an InputError of the sentence and a reason for whatever a library raises when it reads a user's file: for
    files of another shape, transformers and tokenizers raise AttributeError, IndexError and bare Exceptions.

    The block should hold the library's call alone: an error in our own code would be blamed on the file."""
    try:
        with panics_raised():
            yield
    except Exception as error:
        raise InputError(f"{sentence}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Returns an error's first line (two, if it ends in a colon), after its class if the line alone may say little."""
    text = " ".join((str(error).strip().replace(":\n", ": ") or type(error).__name__).splitlines()[0].split())
    return text if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: {text}"


class PluginWarning(UserWarning):
    """A plug-in has changed since a checkpoint or a result was made with it."""


class VersionWarning(UserWarning):
    """A folder has results of another version of headrace, or of a library, than the one that runs."""


class GateWarning(UserWarning):
    """Warns of a spec with a gate that has no effect, or nearly none."""
