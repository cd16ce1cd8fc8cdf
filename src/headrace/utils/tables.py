"""Tables whose rows may come from packages that are imported when one of their rows is asked for."""

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TypeVar

Row = TypeVar("Row")
OFFERS: dict[str, dict[str, str]] = {}  # the modules that add rows when they are imported, by table and by row


def offer(module: str, **rows: tuple[str, ...]) -> None:
    """Names the rows, by table, that a module adds when it is imported."""
    for table, names in rows.items():
        OFFERS.setdefault(table, {}).update(dict.fromkeys(names, module))


class Table(MutableMapping[str, Row]):
    """A dict with the rows that modules `offer`. A module is imported when a row of it is looked up; to list the names
    of the rows or to ask for one of them imports nothing."""

    def __init__(self, name: str, rows: Mapping[str, Row] | None = None):
        self.name, self.rows = name, dict(rows or {})
        self.own = tuple(self.rows)

    def __getitem__(self, key: str) -> Row:
        if key not in self.rows and key in self.offered:
            import_module(self.offered[key])
        return self.rows[key]

    def __setitem__(self, key: str, row: Row) -> None:
        self.rows[key] = row

    def __delitem__(self, key: str) -> None:
        del self.rows[key]

    def __iter__(self) -> Iterator[str]:
        """The rows of the table itself, those that are offered, and others: whatever is imported, in one order."""
        return iter(dict.fromkeys([*filter(self.rows.__contains__, self.own), *self.offered, *self.rows]))

    def __contains__(self, key: object) -> bool:
        return key in self.rows or key in self.offered

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def lacks(self, key: str) -> bool:
        """Whether the row is not there, and no module that is not imported yet offers it."""
        return key not in self.rows and self.offered.get(key, "sys") in sys.modules

    def clear(self) -> None:
        self.rows.clear()

    @property
    def offered(self) -> dict[str, str]:
        return OFFERS.get(self.name, {})
