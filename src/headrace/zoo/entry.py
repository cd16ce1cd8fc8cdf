"""`Entry`, a row of the tables of named mixers and models."""

from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")


class Entry(NamedTuple, Generic[S]):
    """A named mixer or model."""

    about: str
    paper: str  # address of the paper
    spec: S
