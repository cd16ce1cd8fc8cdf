"""Export of a checkpoint to the formats of other runtimes; vllm/, a plug-in of one."""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ..utils.errors import InputError, require

# A format, which is also the name of the module that writes it -> the extra that installs what the module imports.
# The module has a function `export(checkpoint, folder, **options) -> sentence`, which writes the files of the format
# into an empty folder and says what it wrote. Its options have defaults.
FORMATS = {"onnx": "onnx", "web": "onnx", "gguf": "gguf"}


def writer(to: str, options: dict[str, Any]) -> Callable[[Path, Path], str]:
    """Returns the function (checkpoint, folder) -> sentence of a format. options: those that the user has given.

    Raises InputError for an unknown format, and for an option that the format does not have."""
    require(to in FORMATS, f"--to {to!r} is unknown; expected one of {', '.join(FORMATS)}")
    run = import_module(f".{to}", __package__).export
    known = [f"--{name}" for name in list(inspect.signature(run).parameters)[2:]]
    for name in options:
        if f"--{name}" not in known:
            listed = ", ".join(known) or "none"
            raise InputError(f"--{name} has no effect with --to {to}; its options are {listed}")
    return lambda checkpoint, folder: run(checkpoint, folder, **options)
