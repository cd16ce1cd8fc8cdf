"""`Entry`, a row of the tables of named mixers and models."""

from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")


class Entry(NamedTuple, Generic[S]):
    """A named mixer or model."""

    about: str
    paper: str  # address of the paper
    spec: S


def specs(entries: dict[str, Entry[S]]) -> dict[str, S]:
    """Returns the spec of each name."""
    return {name: entry.spec for name, entry in entries.items()}
