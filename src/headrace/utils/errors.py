"""What a user can get wrong."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A bad argument, file or checkpoint. The message is one sentence that names the argument, the value it had
    and what was expected; the command line prints it and exits with code 2."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The known name that is spelt most like an unknown one."""
    return max(names, key=lambda known: difflib.SequenceMatcher(None, name, known).ratio())


class GateWarning(UserWarning):
    """A gate was asked for where it cannot act, or hardly."""
