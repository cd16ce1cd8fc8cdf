"""Functions of a frozen record of options, as Typer and a notebook call them: with the record's fields; and the options
that several commands have."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from errno import ENAMETOOLONG
from functools import partial, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ..files.processes import MOST
from ..utils.errors import InputError, require, shown

T = TypeVar("T")
DEFAULT = r" \[default: {}]"  # its bracket is escaped, as Rich takes "[...]" for markup and prints nothing
Result = TypeVar("Result")
KINDS: dict[Any, str] = {
    int: "an integer", float: "a number", bool: "True or False", str: "text", Path: "a path",
    list[str]: "a list of text", NoneType: "None",
}  # fmt: skip


def option(
    help: str, *names: str, default: str | None = None, least: int | None = None,
    most: int | None = None, kind: Callable[..., Any] = typer.Option, **more: Any,
) -> Any:  # fmt: skip
    """What Typer is to know of an option.

    Args:
        default: what a default of None stands for, which Typer does not show.
        least, most: the smallest and the largest number that is taken, from Python too.
    """
    known = kind(*names, help=help + ("" if default is None else DEFAULT.format(default)), **more)
    known.least, known.most = least, most
    return known


argument = partial(option, kind=typer.Argument)


def setting(
    help: str, default: Any = None, *names: str, shown: str | None = None, kind: Callable[..., Any] = option,
    **more: Any,
) -> Any:  # fmt: skip
    """A field of a record of options: `steps: int = setting("Number of steps.", 200)`.

    Args:
        default: `...` for none: the option is required.
        shown: what a default of None stands for; None: "none".
        kind: `option` or `argument`.
    """
    known = kind(help, *names, default="none" if default is shown is None else shown, **more)
    return field(default=MISSING if default is ... else default, metadata={"known": known})


def takes(record: type[T]) -> Callable[[Callable[[T], Result]], Callable[..., Result]]:
    """Makes a function of a record one of the record's fields: `run(Options(steps=3))` becomes `run(steps=3)`.

    The fields' types, with what Typer is to know of them, and their defaults are those of the new function, so that the
    command line, its help and Python's `help` come from the record alone."""

    def decorate(run: Callable[[T], Result]) -> Callable[..., Result]:
        @wraps(run)
        def call(*args: Any, **kwargs: Any) -> Result:
            given = signature.bind(*args, **kwargs).arguments
            values = {name: checked(name, converted(value, hints[name]), hints[name]) for name, value in given.items()}
            try:
                return run(record(**values))
            except OSError as error:  # of any question about a text that may be a path
                if error.errno != ENAMETOOLONG:
                    raise
                raise InputError(f"{shown(error.filename)} is too long for the name of a file") from None

        hints = _hints(record)
        of_record = inspect.signature(record).parameters
        signature = inspect.Signature([p.replace(annotation=hints[name]) for name, p in of_record.items()])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = hints
        return call

    return decorate


def _hints(record: type) -> dict[str, Any]:
    """The types of a record's fields, with what Typer is to know of them."""
    hints = get_type_hints(record, include_extras=True)
    known = {f.name: f.metadata.get("known") for f in fields(record)}
    return {name: Annotated[hint, known[name]] if known[name] else hint for name, hint in hints.items()}


def converted(value: Any, hint: Any) -> Any:
    """Returns a value of Python as the command line gives it: a path for its text, a list for its only item, text with
    commas for a list where the option is text, text for a path or a number there, and Python's number for NumPy's."""
    kinds = kinds_of(hint)
    items = list(value) if isinstance(value, list | tuple) else [value]
    if list[str] in kinds and value is not None:
        return [str(item) if isinstance(item, Path) else item for item in items]
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if str in kinds and isinstance(value, list | tuple | Path):
        return ",".join(map(str, items))
    if isinstance(value, Real) and not isinstance(value, bool):
        number = int(value) if isinstance(value, Integral) else float(value)
        if float in kinds and -(2**63) <= number < 2**63:
            return float(number)
        return str(number) if str in kinds else number
    return value


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Returns the alternatives of an option's type."""
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(plain) if isinstance(plain, UnionType) else (plain,)


def checked(name: str, value: Any, hint: Any) -> Any:
    """Returns the value of an option. InputError for one of another type, and a number that is too small or large."""
    known, named = next(iter(getattr(hint, "__metadata__", ())), None), f"--{name.replace('_', '-')}"
    kinds = kinds_of(hint)
    if not any(_is(value, kind) for kind in kinds):
        raise InputError(f"{named}={shown(value)}; expected {' or '.join(KINDS[kind] for kind in kinds)}")
    least, most = (known.least, known.most) if known else (None, None)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"{named} has more than 64 bits; expected a smaller number")
    require(None in (least, value) or value >= least, f"{named}={value}; expected at least {least}")
    require(None in (most, value) or value <= most, f"{named}={value}; expected at most {most}")
    return value


def _is(value: Any, kind: Any) -> bool:
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int | float if kind is float else kind) and not (kind is Path and "\0" in str(value))


# --- of several commands ---
Checkpoint = Annotated[
    Path,
    argument(
        "Folder of a checkpoint, as `train`, `convert` or `save_pretrained` of transformers write it, a GGUF file, "
        "or a name on the Hugging Face Hub."
    ),
]
NewFolder = Annotated[Path, option("Folder to create. An existing folder is refused.")]
Device = Annotated[
    str | None,
    option("Device: cpu, cuda, cuda:1, mps, or auto (an accelerator before the CPU).", default="auto"),
]
Weights = Annotated[
    str | None,
    option("Storage of linear layers on a CPU: int8, or bfloat16 with arithmetic as before.", default="as it is"),
]
FASTEST = "the fastest of all, half and 1, measured in the first steps"
Threads = Annotated[int | None, option("Number of threads on a CPU.", default=FASTEST, least=1, most=MOST)]
PromptFile = Annotated[Path | None, option("UTF-8 file to read the text from.", "--file", default="standard input")]
Plugins = Annotated[
    list[str] | None,
    option(
        "Plug-in: a Python file or a module that registers mixers, models or tasks. Repeatable. "
        "HEADRACE_PLUGINS and installed packages add others.",
        "--plugin", default="none", show_default=False,
    ),
]  # fmt: skip
