"""What does not fit in memory, in a sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..utils.errors import InputError

# What PyTorch's errors say of memory that no device has, and of sizes whose product no integer has. Their class
# on a CPU is RuntimeError.
SIGNS = re.compile(
    r"tried to allocate (?P<asked>[\d.]+ \w+)|(multiplication|size calculation) overflow|OutOfMemoryError\(\)", re.I
)


class Shortage(InputError):
    """Something needs more memory than there is."""


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Raises Shortage of `what` where the block needs more memory than there is."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        sign = SIGNS.search(repr(error))
        if not sign and not isinstance(error, MemoryError):
            raise
        asked = f": {sign['asked']} more were asked for" if sign and sign["asked"] else ""
        raise Shortage(f"{what} does not fit in memory{asked}") from error
