"""Parses expressions: NAME(field=value, ...)."""

import re

from ..utils.errors import InputError, require


def expression(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """Parses "a(b=1, c=d)" into ("a", {"b": "1", "c": "d"}). Raises InputError, which calls the expression `kind`."""
    match = re.fullmatch(r"([^()\s]+)\s*(?:\((.*)\))?", text.strip(), re.S)  # adjacent \s* would take quadratic time
    if not match:
        raise InputError(f"{kind} {text!r} is not of the form NAME or NAME(field=value, ...)")
    settings = [[part.strip() for part in setting.partition("=")] for setting in split(match[2] or "")]
    if wrong := next(("".join(setting) for setting in settings if not setting[1]), None):
        raise InputError(f"{wrong!r} in {kind} {text!r} is not of the form field=value")
    _refuse_overwriting([path for path, *_ in settings], f"{kind} {text!r}")
    return match[1], {path: value for path, _, value in settings}


def _refuse_overwriting(paths: list[str], where: str) -> None:
    """Raises InputError where a later setting would discard an earlier one: the same field, or the record around it."""
    for i, path in enumerate(paths):
        require(path not in paths[:i], f"{where} sets {path!r} twice; expected each field once")
        if overwritten := next((earlier for earlier in paths[:i] if earlier.startswith(f"{path}.")), None):
            both = f"{where} sets {overwritten!r} and {path!r}, which contains {overwritten!r}"
            raise InputError(f"{both}; expected {path!r} first")


def split(text: str, mark: str = ",") -> tuple[str, ...]:
    """Splits at the mark outside parentheses: "a, b(c=1, d=2), e" -> ("a", "b(c=1, d=2)", "e").

    Raises InputError for an empty item, as in "a,,b"."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    items = tuple(part.strip() for part in parts)
    if any(items) and not all(items):
        sign = "plus" if mark == "+" else "comma"
        raise InputError(f"{text!r} has nothing on one side of a {sign}; expected an item on both sides")
    return tuple(part for part in items if part)


def literal(text: str):
    """Returns the int, float or bool that the text spells, else the text."""
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
