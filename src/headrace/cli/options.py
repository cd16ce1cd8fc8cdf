"""Functions of a frozen record of options, as Typer and a notebook call them: with the record's fields."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")
Result = TypeVar("Result")


def takes(record: type[T]) -> Callable[[Callable[[T], Result]], Callable[..., Result]]:
    """Makes a function of a record one of the record's fields: `run(Options(steps=3))` becomes `run(steps=3)`.

    The fields' types, with what Typer is to know of them, and their defaults are those of the new function, so that the
    command line, its help and Python's `help` come from the record alone."""

    def decorate(run: Callable[[T], Result]) -> Callable[..., Result]:
        @wraps(run)
        def call(*args: Any, **kwargs: Any) -> Result:
            return run(record(*args, **kwargs))

        hints = get_type_hints(record, include_extras=True)
        call.__signature__ = inspect.Signature([_parameter(f, hints[f.name]) for f in fields(record)])  # type: ignore
        call.__annotations__ = hints
        return call

    return decorate


def _parameter(field: Field, hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=hint)
