"""Plug-ins: Python files and modules that register mixers, models and tasks of their own when they are imported.

A plug-in is named by the option `--plugin` of a command, by the environment variable HEADRACE_PLUGINS, which the
processes that a command starts inherit, or by an entry point of an installed package.
"""

import os
import sys
import traceback
from collections.abc import Iterable, MutableMapping
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

from .errors import InputError, require
from .integrity import digest, sha256

VARIABLE = "HEADRACE_PLUGINS"  # files and modules, separated like the folders of PATH
GROUP = "headrace.plugins"  # of entry points
FILE = "headrace_plugin_"  # before the name of a file: its module's name
PACKAGE = "__init__.py"
PREFIX = "module:"  # in JSON, before the name of a mixer whose layer is a module of a plug-in


class Plugin(NamedTuple):
    """name: that of the file or the module. sha256: of the file, or of the files of a package."""

    name: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name} (sha256 {self.sha256[:12]})" if self.sha256 else self.name


LOADED: dict[str, Plugin] = {}  # by what `load` takes: the absolute path of a file, or the name of a module
REGISTERED: list[tuple[str | None, tuple]] = []  # of each call that registered something: its file, and the rows
_LOADING: list[Plugin] = []


def load(names: Iterable[str] = (), option: str = "--plugin") -> None:
    """Imports the plug-ins of installed packages, of HEADRACE_PLUGINS and of `names` that are not loaded yet, and adds
    `names` to HEADRACE_PLUGINS for the processes that this one starts.

    Raises InputError for a plug-in that does not exist, that raises an error, or that registers nothing."""
    for entry in entry_points(group=GROUP):
        _load(entry.module, f"entry point {entry.name!r} of {GROUP}")
    listed = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    places = [*(_load(name, VARIABLE) for name in listed), *(_load(name, option) for name in names)]
    if places:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(places))


def of(definition: type) -> Plugin:
    """Returns the plug-in that is being loaded or, for a class of another program, the file or package of the class."""
    if _LOADING:
        return _LOADING[-1]
    name = definition.__module__.partition(".")[0]
    files = (getattr(sys.modules.get(module), "__file__", None) for module in (name, definition.__module__))
    path = Path(next(filter(None, files), ""))
    if not path.is_file():  # of an interactive session
        return Plugin(definition.__module__, "")
    return Plugin(name if path.name == PACKAGE else path.name, _sha256(path))


def note_registration(*rows: tuple[MutableMapping[str, Any], str]) -> None:
    """Notes a call of the function that calls this one, and the rows of tables that it has added."""
    REGISTERED.append((sys._getframe(2).f_globals.get("__file__"), rows))


def digests() -> dict[str, str]:
    """Returns {"plugin NAME": digest} of the loaded plug-ins, for the records of results."""
    return {f"plugin {plugin.name}": f"sha256 {plugin.sha256[:12]}" for plugin in LOADED.values()}


def missing(kind: str, data: dict[str, Any]) -> InputError:
    """Returns the error for JSON of a mixer whose plug-in is not loaded."""
    needed = Plugin(str(data.get("plugin", "that registers it")), str(data.get("sha256", "")))
    loaded = ", ".join(map(str, LOADED.values())) or "none"
    return InputError(
        f"mixer {kind.removeprefix(PREFIX)!r} is of the plug-in {needed}, and the loaded plug-ins are {loaded}; "
        f"expected --plugin or {VARIABLE} with that file"
    )


def _load(name: str, source: str) -> str:
    """Imports one plug-in and returns its key in LOADED. source: what names it, for errors."""
    place, path = _locate(name, source)
    require(os.pathsep not in place, f"plug-in {place!r} has {os.pathsep!r}, which divides {VARIABLE}; expected none")
    if place in LOADED:
        return place
    package = Path(getattr(sys.modules.get(place.partition(".")[0]), "__file__", None) or path)  # of a submodule
    plugin, registered = Plugin(Path(name).name, _sha256(package)), len(REGISTERED)
    LOADED[place] = plugin
    _LOADING.append(plugin)
    try:
        _execute(place, path)
        if registered == len(REGISTERED) and {*map(str, _files(package))}.isdisjoint(dict(REGISTERED)):
            raise InputError("it registers nothing; expected a call of register_mixer, register_model or register_task")
    except BaseException as error:
        del LOADED[place]
        if getattr(sys.modules.get(FILE + path.stem), "__file__", None) == place:
            del sys.modules[FILE + path.stem]
        imported = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
        for table, row in (row for by, rows in REGISTERED[registered:] if by not in imported for row in rows):
            table.pop(row, None)  # its file is executed again
        REGISTERED[registered:] = [each for each in REGISTERED[registered:] if each[0] in imported]
        if isinstance(error, Exception | SystemExit):
            raise InputError(f"plug-in {name!r} ({source}) cannot be loaded: {_reason(error, path)}") from error
        raise
    finally:
        _LOADING.pop()
    return place


def _files(path: Path) -> list[Path]:
    """The file of a plug-in or, for a package, its Python files, in an order that no system changes."""
    return sorted(path.parent.rglob("*.py"), key=lambda f: f.parts) if path.name == PACKAGE else [path]


def _sha256(path: Path) -> str:
    files = [(file.relative_to(path.parent).as_posix(), sha256(file)) for file in _files(path)]
    return files[0][1] if len(files) == 1 else digest(files)


def _locate(name: str, source: str) -> tuple[str, Path]:
    """Returns (the key in LOADED, the file) of a plug-in."""
    path, called = Path(name), f"plug-in {name!r} ({source})"
    if path.suffix == ".py" or path.name != name or path.is_file():
        require(path.is_file(), f"{called} does not exist; expected a Python file or a module")
        require(path.suffix == ".py", f"{called} is no Python file; expected a name that ends in .py")
        return str(path.resolve()), path.resolve()
    try:
        found: Any = find_spec(name)
    except Exception as error:  # of the package that the module is in
        raise InputError(f"{called} cannot be loaded: {_reason(error, path)}") from error
    require(found and found.has_location, f"{called} is no module that Python finds; expected one, or a Python file")
    return name, Path(str(found.origin))


def _execute(place: str, path: Path) -> None:
    if place != str(path):
        import_module(place)
        return
    name = FILE + path.stem
    require(name not in sys.modules, f"another plug-in is called {path.name} too; expected different names")
    spec: Any = spec_from_file_location(name, path)
    sys.modules[name] = module = module_from_spec(spec)  # from where tasks are unpickled
    spec.loader.exec_module(module)


def _reason(error: BaseException, path: Path) -> str:
    """Returns the last line of the error's traceback, and the last line of the plug-in in it."""
    last = str(error) if isinstance(error, InputError) else traceback.format_exception_only(error)[-1].strip()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    return last.splitlines()[-1] + (f" (line {lines[-1]})" if lines else "")
