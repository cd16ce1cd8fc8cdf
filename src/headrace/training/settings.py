"""Settings of the form FIELD=VALUE on the command line."""

from ..utils.errors import InputError


def assignments(settings: list[str]) -> dict[str, str]:
    """["lr=1e-4", …] -> {"lr": "1e-4", …}. InputError for a setting without "=" or a field that is set twice."""
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise InputError(f"{setting!r} is not of the form FIELD=VALUE")
        if name in values:
            raise InputError(f"{name!r} is set twice, to {values[name]!r} and to {value!r}; expected each field once")
        values[name] = value
    return values
