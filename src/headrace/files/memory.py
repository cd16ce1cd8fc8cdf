"""What does not fit in memory, in a sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..utils.errors import InputError

# What PyTorch's errors say of memory that no device has, and of sizes whose product no integer has.
SIGNS = re.compile(r"tried to allocate (?P<asked>[\d.]+ \w+)|multiplication overflow|size calculation overflow", re.I)


class Shortage(InputError):
    """Something needs more memory than there is."""


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Raises Shortage of `what` where the block needs more memory than there is."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        sign = SIGNS.search(str(error))
        if not sign and not isinstance(error, MemoryError):
            raise
        asked = f": {sign['asked']} more were asked for" if sign and sign["asked"] else ""
        raise Shortage(f"{what} does not fit in memory{asked}") from error
