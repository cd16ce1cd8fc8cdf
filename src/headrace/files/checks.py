"""Files that a user gives: text in UTF-8, JSON of a form, folders with checksums, the files of a model, and its
tokenizer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from ..utils.errors import InputError, reading, require
from ..utils.integrity import CHECKSUMS, Recorded, sha256, short

SUM = "sha256"  # key of the checksum of a result
SENTENCEPIECE = ("*.model", "*.tiktoken", "tekken.json")  # names of files of tokenizers that need another package
TOKENIZERS = ("tokenizer*", "vocab*", "merges*", *SENTENCEPIECE)
MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin")  # suffixes of the files of a model
RECORDED = {...: (int, {"bytes": int, "sha256": str})}  # the form of `integrity.Recorded`
Form = Any  # of a JSON value: see `misfit`


def stamps(*names: str | None) -> tuple[tuple[int, ...], ...]:
    """Returns what changes with files, and with those in folders, for caches of what is read from them."""
    files = (file for name in names if name for file in (Path(name), *Path(name).rglob("*")) if file.is_file())
    return tuple((at.st_ino, at.st_mtime_ns, at.st_size) for at in map(Path.stat, files))


def check_encoding(begin: bytes, name: str) -> None:
    """Raises InputError if a file begins as text in UTF-16 or UTF-32 does: by a byte order mark, or by zero bytes.

    begin: the first four bytes, or more."""
    if begin and not (encoding := json.detect_encoding(begin[:4])).startswith("utf-8"):
        raise InputError(f"{name} is {encoding.upper()}; expected UTF-8")


def decode(data: bytes, name: str) -> str:
    """Decodes UTF-8, and leaves out a byte order mark. InputError for another encoding."""
    check_encoding(data, name)
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is 0x{data[error.start]:02x} ({error.reason})"
        raise InputError(f"{name} is not UTF-8: {wrong}") from None


def read_json(path: Path, form: Form = None, cure: str = "") -> Any:
    """Returns the content of a JSON file. Raises InputError if the file cannot be read, is not JSON or does not have
    the form, which `misfit` describes. cure: what the sentence about a file that is not JSON ends with."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not JSON ({error}){cure}") from None
    if form is not None and (wrong := misfit(content, form)):
        raise InputError(f"{str(path)!r} is damaged: {wrong}")
    return content


def misfit(value: Any, form: Form, where: str = "it") -> str | None:
    """Returns a sentence about the first part of a JSON value that does not have a form, or None.

    form: a type; None; a tuple of forms, one of which must fit; a list of the form of all items; or a dict of the names
        of an object to their forms. A name that ends in ? may be missing; `...` stands for all other names.
    """
    if isinstance(form, tuple):
        misfits = [misfit(value, alternative, where) for alternative in form]
        return misfits[0] if all(misfits) else None
    kind: Any = form if isinstance(form, type) else type(form)
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"{where} is {short(value)}, not {KINDS[kind]}"
    if type(value) is int and abs(value) >= 2**63:
        return f"{where} is {short(value)}, which has more than 64 bits"
    if isinstance(form, list):
        return next(filter(None, (misfit(x, form[0], f"item {i} of {where}") for i, x in enumerate(value))), None)
    return _misfit_of_names(value, form, where) if isinstance(form, dict) else None


KINDS = {
    dict: "an object", list: "a list", str: "a text", int: "an integer", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def _misfit_of_names(value: dict[str, Any], form: dict[Any, Form], where: str) -> str | None:
    named = {name.removesuffix("?"): its_form for name, its_form in form.items() if name is not ...}
    if missing := next((name for name in named if name not in value and f"{name}?" not in form), None):
        return f"{where} has no {missing!r}"
    forms = {name: named.get(name, form.get(...)) for name in value if name in named or ... in form}
    return next(filter(None, (misfit(value[name], its_form, repr(name)) for name, its_form in forms.items())), None)


def read_record(path: Path) -> Recorded:
    """Returns sizes and checksums of the files of a folder, which the file `path` of the folder lists.

    Raises InputError if the file is no such list, or names a file outside the folder."""
    recorded = read_json(path, RECORDED)
    if outside := next((name for name in recorded if not is_inside(name)), None):
        raise InputError(f"{str(path)!r} is damaged: it names {outside!r}, which is outside the folder")
    return recorded


def is_inside(name: str) -> bool:
    """Whether the path `name` stays in the folder that it is relative to."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def damage(folder: Path, recorded: Recorded, contents: bool = True) -> str | None:
    """Returns a sentence about the first file that differs from its record, or None if no file does.

    contents: read the files and compare their SHA-256; False compares sizes only."""
    for name, expected in recorded.items():
        if not is_inside(name):
            return f"it names {name!r}, which is outside the folder"
        file = folder / name
        size, content = (expected, None) if isinstance(expected, int) else (expected["bytes"], expected["sha256"])
        actual_size = file.stat().st_size if file.is_file() else None
        if actual_size != size:
            return f"{name} has {actual_size} bytes, not {size}"
        if contents and content is not None and sha256(file) != content:
            return f"{name} has another SHA-256 than when it was written"
    return None


def check_files(folder: Path) -> None:
    """Raises InputError if a file of a model is no regular file, such as a pipe, whose reading might not end, or if an
    index of its weights names a file outside the folder. Links are followed, as the Hub's cache consists of them."""
    paths = [path for path in folder.glob("*") if path.suffix in MODEL_FILES]
    for index in (path for path in paths if path.name.endswith(".index.json") and path.is_file()):
        names = {*read_json(index, {"weight_map": {...: str}})["weight_map"].values()}
        if outside := next((name for name in sorted(names) if not is_inside(name)), None):
            raise InputError(f"{str(index)!r} names {outside!r}, which is outside the folder")
        paths += [folder / name for name in names]
    if special := next((path for path in paths if path.exists() and not (path.is_file() or path.is_dir())), None):
        raise InputError(f"{str(special)!r} is not a regular file")


def check_weights(folder: Path) -> None:
    """Raises InputError as `check_files`, or if a model's weights differ from their checksums. A folder without
    checksums passes."""
    check_files(folder)
    if not (folder / CHECKSUMS).is_file():
        return
    if wrong := damage(folder, read_record(folder / CHECKSUMS)):
        cure = f"delete {CHECKSUMS} if it was changed on purpose"
        raise InputError(f"checkpoint {str(folder)!r} is damaged: {wrong}; {cure}")


@contextmanager
def reading_tokenizer(source: Path | str, sentence: str) -> Iterator[None]:
    """`reading` of a tokenizer by transformers, which makes up an empty one for a folder of a model that has none. For
    a sentencepiece model, which needs a package that no extra installs, the InputError names that package alone;
    transformers writes several lines and names another one, for any folder that it cannot read."""
    from .quiet import quiet

    folder = Path(source)
    require(not folder.is_dir() or _any_of(folder, TOKENIZERS), f"{sentence}: the folder has no files of a tokenizer")
    if (folder / "config.json").is_file():
        from .. import hf  # noqa: F401  transformers reads it too, and warns of a model that it does not know
    absent = find_spec("sentencepiece") is None and (not folder.is_dir() or _any_of(folder, SENTENCEPIECE))
    with reading(sentence), quiet() if absent else nullcontext():
        try:
            yield
        except (ImportError, ValueError) as error:
            if not any(name in str(error).lower() for name in ("sentencepiece", "tiktoken")):
                raise
            needed = "its tokenizer.model needs sentencepiece: pip install sentencepiece"
            raise InputError(needed if absent else "its files are not of a known kind of tokenizer") from error


def _any_of(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)
