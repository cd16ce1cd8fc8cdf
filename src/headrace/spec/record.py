"""The base of all specs: frozen dataclasses that validate their fields against the type hints.

A field's type hint may be bool, int, float, str, a Literal, a record, None, a tuple of these, or a union of these.
`Annotated` with a `Range` restricts a number, and with `Names` a text.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from functools import cache, reduce
from math import isfinite
from sys import float_info
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from ..utils.errors import InputError, require, require_each, shown

LARGEST = 2**31  # no size of a model, a task or a run is as large; larger integers do not fit a float or a tensor


class Range(NamedTuple):
    """The numbers that a field accepts: a description for errors, and a predicate."""

    text: str
    holds: Callable[[float], bool]


class Names(NamedTuple):
    """The texts that a field accepts, where a table lists them."""

    among: Collection[str]


PositiveInt = Annotated[int, Range("at least 1", lambda n: n >= 1)]
NonNegativeInt = Annotated[int, Range("at least 0", lambda n: n >= 0)]
PositiveFloat = Annotated[float, Range("more than 0, as float32", lambda x: x >= 2**-126)]
NonNegativeFloat = Annotated[float, Range("at least 0", lambda x: x >= 0)]
Factor = Annotated[float, Range("more than 0 and at most 2^16", lambda x: 0 < x <= 2**16)]  # of the hidden size
LIMITS = {  # of all numbers, whatever the range of their field: seeds have up to 32 bits, and floats are for float32
    int: Range("less than 2^32 in size", lambda n: abs(n) < 2**32),
    float: Range("less than 2^128 in size", lambda x: abs(x) < 2**128),
}


class Kind(NamedTuple):
    """One alternative of a field's type hint."""

    type: type
    among: Collection[Any] = ()  # values of a Literal, or names
    range: Range | None = None
    items: tuple["Kind", ...] = ()  # alternatives for the items of a tuple


class Record:
    """Base class of the specs. Construction raises InputError for invalid values and contradictory fields."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, kinds in fields(cls).items():
            object.__setattr__(self, name, checked(getattr(self, name), kinds, cls.__name__, name))
        for condition, reason in self._objections():
            require(not condition, reason)

    def _objections(self) -> Iterator[tuple[bool, str]]:
        """Yields (condition, message) pairs; a true condition makes the record invalid."""
        return iter(())


@cache
def fields(cls: type) -> dict[str, tuple[Kind, ...]]:
    """Returns the alternatives that each field of a dataclass accepts, by the field's name."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: alternatives(hints[f.name]) for f in dataclasses.fields(cls)}


def alternatives(hint: Any) -> tuple[Kind, ...]:
    """Returns the alternatives of a type hint."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return tuple(Kind(t, among=tuple(x for x in args if type(x) is t)) for t in dict.fromkeys(map(type, args)))
    if origin is Annotated:
        known = args[1]
        return (Kind(args[0], among=known.among) if isinstance(known, Names) else Kind(args[0], range=known),)
    if origin is tuple:
        return (Kind(tuple, items=alternatives(args[0])),)
    return tuple(kind for arg in args for kind in alternatives(arg)) if args else (Kind(hint),)


def checked(value: Any, kinds: tuple[Kind, ...], *where: str) -> Any:
    """Checks a value against the alternatives of its field, and converts an int to float and a list to a tuple. Raises
    InputError for any other value; `where` is the path of the field."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise InputError(f"{'.'.join(where)} has more than 64 bits; expected a smaller number")
    for kind in kinds:
        if kind.items and type(value) in (list, tuple):
            return tuple(checked(item, kind.items, *where, str(i)) for i, item in enumerate(value))
        converted = float(value) if kind.type is float and type(value) is int else value
        if fits(converted, kind):
            for range in (kind.range, LIMITS.get(kind.type)):
                if range is not None and not range.holds(converted):
                    raise InputError(f"{'.'.join(where)}={shown(value)}; expected {range.text}")
            return converted
    allowed = [name for kind in kinds for name in _names(kind)]
    among = "one of " if len(allowed) > 1 else ""
    raise InputError(f"{'.'.join(where)}={shown(value)} is not allowed; expected {among}{', '.join(allowed)}")


def fits(value: Any, kind: Kind) -> bool:
    if type(value) is not kind.type:
        return issubclass(kind.type, Record) and isinstance(value, kind.type)
    return value in kind.among if kind.among else kind.type is not float or isfinite(value)  # type: ignore[arg-type]


def _names(kind: Kind) -> list[str]:
    if kind.among:
        return [str(value) for value in kind.among]
    if kind.items:
        return [f"tuple of {' or '.join(name for item in kind.items for name in _names(item))}"]
    return [{NoneType: "None", float: "finite float"}.get(kind.type, kind.type.__name__)]


def asked_for(spec: Any, field: str, values: tuple[Any, ...] = ()) -> bool:
    """Whether a field of a spec, as in "heads.count", has one of these values, or another one than its default."""
    *parts, name = field.split(".")
    record = reduce(getattr, parts, spec)
    if record is None:
        return False
    value = getattr(record, name)
    return value in values if values else value != getattr(type(record), name)


def require_positive(**sizes: Any) -> None:
    """Raises InputError unless every size is a positive integer of less than LARGEST."""
    require_each(lambda n: type(n) is int and 1 <= n < LARGEST, "a positive integer of less than 2^31", **sizes)


def require_positive_numbers(**values: Any) -> None:
    """Raises InputError unless every value is a positive, finite number."""
    require_each(lambda x: type(x) in (int, float) and 0 < x <= float_info.max, "a positive number", **values)


def require_bools(**values: Any) -> None:
    """Raises InputError unless every value is True or False."""
    require_each(lambda x: isinstance(x, bool), "True or False", **values)


def require_name(among: Collection[str], **names: Any) -> None:
    """Raises InputError unless every name is among these."""
    for name, value in names.items():
        if not isinstance(value, str) or value not in among:
            raise InputError(f"{name}={shown(value)} is unknown; expected one of {', '.join(among)}")
