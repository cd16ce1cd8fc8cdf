"""A row of the zoo."""

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A named mixer or model."""

    about: str
    paper: str  # address of the paper
    spec: Any
