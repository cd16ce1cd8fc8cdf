"""Errors and warnings about what a user provides."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """An invalid argument, file or checkpoint. The message is one sentence that names the argument, its value and what
    was expected. The command line prints the message and exits with code 2."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the one of `names` whose spelling is closest to `name`."""
    return max(names, key=lambda known: difflib.SequenceMatcher(None, name, known).ratio())


class GateWarning(UserWarning):
    """A spec has a gate that has no effect, or nearly none."""
