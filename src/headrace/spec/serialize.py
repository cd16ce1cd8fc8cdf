"""Specs as JSON, and changes of their fields."""

import dataclasses
from types import NoneType
from typing import Any

from ..utils import plugins
from ..utils.errors import InputError, require, require_each
from ..utils.tables import Table
from .attention import AttentionSpec
from .linear import MixerSpec
from .mixer import Spec
from .record import Kind, Record, checked, fields, fits

# The records that JSON names by a type. A new kind of mixer is a subclass of `Spec` with a row here, the module of its
# layer, and an entry of zoo/mixers.py.
TYPES: Table[type] = Table("types", {"linear": MixerSpec, "attention": AttentionSpec})


def to_json(spec) -> Any:
    """Returns a spec as dicts, lists and literals, from which `from_json` makes an equal spec."""
    if not isinstance(spec, Record):
        return [to_json(item) for item in spec] if isinstance(spec, tuple) else spec
    cls: Any = type(spec)
    data = {name: to_json(getattr(spec, name)) for name in fields(cls)}
    kind = next((name for name, of in TYPES.rows.items() if of is cls), None)
    return {"type": kind} | data if kind else data


def from_json(data: Any, where: str = ""):
    """Returns the spec that `to_json` converted. Raises InputError, which calls `data` by the name `where`, for data
    that describe no spec."""
    require_each(lambda x: isinstance(x, dict), "a dict as to_json returns it", **{where or "mixer": data})
    if (kind := data.get("type")) is None:
        known = f"{', '.join(TYPES)} (register_mixer adds others)"
        raise InputError(f"{where or 'mixer'} lacks the field 'type'; expected one of {known}")
    if isinstance(kind, str) and kind.startswith(plugins.PREFIX) and kind not in TYPES:
        plugins.load()
        if kind not in TYPES:
            raise plugins.missing(kind, data)
    if not isinstance(kind, str) or kind not in TYPES:
        raise InputError(f"mixer type {kind!r} is unknown; expected one of {', '.join(TYPES)}")
    return record(TYPES[kind], {name: value for name, value in data.items() if name != "type"}, where or kind)


def record(cls, data: dict[str, Any], where: str):
    """Makes a record from dicts of its fields. Raises InputError for a missing field and for invalid values."""
    values = admitted(cls, data, where)
    needed = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    if missing := next((name for name in needed if name not in values), None):
        raise InputError(f"{where} lacks the field {missing!r}; expected a value for it")
    return cls(**values)


def admitted(cls, data: dict[str, Any], where: str) -> dict[str, Any]:
    """Checks and converts the values of some fields of a record. Raises InputError, which calls `data` `where`, for
    unknown fields and invalid values."""
    known, values = fields(cls), {}
    for name, value in data.items():
        require(name in known, f"{where} has no field {name!r}; expected one of {', '.join(known)}")
        path = f"{where}.{name}"
        values[name] = checked(_value(value, known[name], path), known[name], path)
    return values


def _value(value: Any, kinds: tuple[Kind, ...], where: str) -> Any:
    """Converts JSON data for a field of these kinds: a dict to a record, "none" to None, a single item to a tuple."""
    if (value is None or value == "none") and any(kind.type is NoneType for kind in kinds):
        return None
    items = next((kind.items for kind in kinds if kind.items), ())
    if items and not any(fits(value, kind) for kind in kinds if not kind.items):
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple(_value(item, items, f"{where}.{i}") for i, item in enumerate(listed))
    nested = next((kind.type for kind in kinds if issubclass(kind.type, Record)), None)
    if nested is None or not isinstance(value, dict):
        return value
    return from_json(value, where) if "type" in value or nested is Spec else record(nested, value, where)


def change(spec, path: str, value):
    """Returns a copy of a spec with one field changed, as in change(spec, "heads.expand_v", 2.0).

    Raises InputError for an unknown field and an invalid value."""
    return change_all(spec, {path: value})


def change_all(spec, values: dict[str, Any]):
    """Returns a copy of a spec with several fields changed. Only the resulting spec has to be valid."""
    data = to_json(spec)
    for path, value in values.items():
        *parents, last = path.split(".")
        node = data
        for name in parents:
            if not isinstance(node.get(name), dict):
                raise InputError(f"{path!r} names no field of this mixer ({name!r} is none, or no record of it)")
            node = node[name]
        node[last] = value
    return from_json(data)
