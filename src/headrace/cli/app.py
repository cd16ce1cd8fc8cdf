"""The command line. A user's mistake is one sentence on stderr and exit code 2; Ctrl-C is exit code 130."""

import errno
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from .. import __version__
from ..files.hub import ask_hub, check_config, is_on_the_hub
from ..files.memory import fitting
from ..utils import plugins
from ..utils.errors import InputError
from . import compare, evaluate, linearize, train, use, verify
from .console import Interrupted, needing, printable
from .options import Plugins, option

# Errors of a full disk, or of a path that this user cannot write, or nobody.
UNWRITABLE = {
    getattr(errno, f"E{name}")
    for name in ("NOSPC", "DQUOT", "FBIG", "ROFS", "ACCES", "PERM", "NOTDIR", "ISDIR", "EXIST", "LOOP", "NAMETOOLONG")
}
UsageError: Any = typer.BadParameter.__base__  # click's, of which newer versions of Typer contain a copy

app = typer.Typer(pretty_exceptions_enable=False)


def main() -> NoReturn:
    """Runs the command of `sys.argv` and exits."""
    prepare_streams()
    try:
        with fitting("what this command computes"):
            sys.exit(app(sys.argv[1:] or ["--help"], prog_name="headrace", standalone_mode=False))
    except InputError as error:
        refuse(str(error))
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "headrace"
        if field := field_of_recipe(command, getattr(error, "option_name", "")):
            refuse(f"{command} has no option --{field}; expected the field as {field}=VALUE behind the recipe")
        refuse(f"{' '.join(error.format_message().split()).rstrip('.')} (try `{command} --help`)")
    except UnicodeEncodeError as error:
        letter = ascii(error.object[error.start])
        refuse(f"the output has {letter}, which {error.encoding} cannot write; set PYTHONIOENCODING=utf-8")
    except typer.Abort:  # Ctrl-C, in older versions of Typer
        sys.exit(130)
    except Exception as error:
        if (code := system_code(error)) not in UNWRITABLE:
            raise
        refuse(f"{getattr(error, 'filename', None) or 'the output'}: {os.strerror(code)}")


def prepare_streams() -> None:
    """Replaces output that was closed, and keeps the bars of tqdm out of files: libraries that ask for a bar by all
    means draw it once a minute there. Before tqdm is imported, which reads the environment only then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if not sys.stderr.isatty():
        for name, value in {"TQDM_DISABLE": "1", "TQDM_MININTERVAL": "60"}.items():
            os.environ.setdefault(name, value)


def field_of_recipe(command: str, option: str) -> str | None:
    """The field of a recipe that someone took for an option of `train`."""
    if command != "headrace train":
        return None
    from ..training.recipes import Recipe

    name = option.lstrip("-").replace("-", "_")
    return name if name in {field.name for field in fields(Recipe)} else None


def system_code(error: Exception) -> int:
    """The number of the system's error that an exception is about; 0: none. safetensors and tokenizers raise their own
    exceptions, with the number in the text."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else 0


def check_written(error: Exception, options: dict[str, Any]) -> None:
    """Raises InputError with the option for an error about the file or folder that it has named for output, which is
    written under a temporary name beside it. Errors of a full disk do not say which file was written."""
    code, file = system_code(error), getattr(error, "filename", None)
    for name in ("output", "save_state"):
        if (path := options.get(name)) is None:
            continue
        beside = file is not None and Path(file).parent == path.parent and path.name in Path(file).name
        beside |= file is not None and Path(file) in path.parents  # a file where a folder is to be
        if beside or (file is None and code in UNWRITABLE):
            named = f"--{name.replace('_', '-')} {str(path)!r}" + ("" if beside else ", or what is printed,")
            raise InputError(f"{named} cannot be written: {os.strerror(code)}") from error


def check_names(options: dict[str, Any]) -> None:
    """Raises InputError for a name whose bytes Python has kept as surrogates, which no tokenizer or report takes."""
    for name, value in {name.replace("_", "-"): value for name, value in options.items()}.items():
        names = [] if name == "prompt" else value if isinstance(value, list) else [value]
        if unread := next((text for text in map(str, names) if re.search("[\ud800-\udfff]", text)), None):
            encoding = sys.getfilesystemencoding()
            cure = "" if encoding == "utf-8" else f": Python reads names as {encoding} here; set PYTHONUTF8=1"
            raise InputError(f"--{name} {unread!a} has bytes that are no {encoding} text; expected UTF-8{cure}")


def refuse(sentence: str) -> NoReturn:
    print(f"headrace: {printable(sentence)}", file=sys.stderr)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, option("Version and available backends.", "--version")] = False) -> None:
    """Linear-time sequence models, with or without gates over their heads."""
    if version:
        print(f"headrace {__version__}")
        verify.backends()
        raise typer.Exit


class Command(NamedTuple):
    run: Callable
    extra: str | None  # the extra that installs its packages, or several joined by commas; None: no extra
    examples: tuple[str, ...]  # without `headrace NAME`


MODEL = "runs/laptop-5m-gla/model"
GROUPS = {
    "Compare": {
        "compare": Command(compare.compare, "studies", (
            "",
            "--task mqar --mixers gla,softmax-gla,transformer --seeds 3",
            "--task mqar --sweep pairs=1,2,4 --mixers gla,softmax-gla",
            "--text novel.txt --mixers retnet,softmax-retnet",
            "--plugin my_file.py --mixers gla,my-mixer --task my-task",
            "--plugin my_file.py --mixers my-mixer --suite small",
        )),
        "zoo": Command(compare.list_zoo, None, ("", "--show cost")),
        "verify": Command(
            verify.verify, None, ("", "--mixers gla,softmax-kda --dtype float32", "transformers:mamba2 --json"),
        ),
        "backends": Command(verify.backends, None, ("",)),
    },
    "Train": {
        "prepare": Command(train.prepare, "train", (
            "my.txt --train-bpe 4096 --held-out 0.05 --output data",
            '--task "needle(length=1024)" --rows 5000 --output needles',
        )),
        "train": Command(train.train, "train", (
            "laptop-5m --mixer softmax-gla --data data", "paper-340m lr=1e-3 --mixer gla --dry-run",
        )),
        "curves": Command(train.curves, "studies,train", ("runs/laptop-5m-gla runs/laptop-5m-softmax-gla",)),
        "recipes": Command(train.list_recipes, "train", ("", "--mixers gla,softmax-gla")),
    },
    "Evaluate": {
        "eval": Command(evaluate.evaluate, "eval", (
            f"{MODEL} EleutherAI/pythia-14m --suite language", f"{MODEL} --suite needle --lengths 1024,4096",
        )),
        "bench": Command(evaluate.bench, "studies", (
            "", "--mixers gla,mamba2 --what decoding --contexts 1024,16384",
        )),
    },
    "Understand": {
        "inspect": Command(evaluate.inspect, "studies", (f"{MODEL} --file novel.txt --tokens 2000",)),
    },
    "Use": {
        "generate": Command(use.generate, "models", (
            f'{MODEL} --prompt "It was"',
            f"{MODEL} --file novel.txt --save-state state",
            f'{MODEL} --resume state --prompt "And"',
        )),
        "serve": Command(use.serve, "serve", (f"{MODEL} --port 8000",)),
        "convert": Command(use.convert, "models", (
            "llama-checkpoint --output ours", "SmolLM2.gguf --output ours", f"{MODEL} --to gla --output theirs",
        )),
        "export": Command(use.export, "models", (f"{MODEL} --to onnx --output model-onnx",)),
        "retrofit": Command(use.retrofit, "models", (f"{MODEL} --output competing",)),
        "linearize": Command(linearize.linearize, "train", (
            "smol --data data --output linear", "smol --mixer gla --keep worst=8 --data data --output gla",
        )),
    },
}  # fmt: skip


WITHOUT_PLUGINS = ("backends", "curves")  # which know of no mixer and no task


def register(group: str, name: str, command: Command) -> None:
    # A blank line between examples: older versions of Typer join the lines of a paragraph.
    epilog = "\n\n".join(["Examples:", *(f"headrace {name} {example}".strip() for example in command.examples)])
    paragraphs = inspect.cleandoc(command.run.__doc__ or "").split("\n\n")  # Typer would keep the line breaks in them
    description = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name=name, rich_help_panel=group, help=description, epilog=epilog)(for_typer(name, command))


def for_typer(name: str, command: Command) -> Callable:
    """Returns a command for Typer: with the option --plugin, whose plug-ins are loaded before it runs, and with an exit
    code in place of an interruption. It returns nothing, as what a command returns is for Python."""

    @wraps(command.run)
    def run(plugin: list[str] | None = None, **options: Any) -> None:
        with needing(command.extra, name):
            check_names(options)
            if (checkpoint := options.get("checkpoint")) is not None:  # before PyTorch is imported, which takes seconds
                ask_hub() if is_on_the_hub(checkpoint) else check_config(Path(checkpoint))
            plugins.load(plugin or ())
            try:
                command.run(**options)
            except Interrupted as stop:
                raise typer.Exit(*stop.args) from None
            except InputError:
                raise
            except Exception as error:
                check_written(error, options)
                raise

    if name not in WITHOUT_PLUGINS:
        parameters = inspect.signature(command.run).parameters.values()
        added = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Plugins)
        run.__signature__ = inspect.Signature([*parameters, added])  # type: ignore[attr-defined]
        run.__annotations__ = {**command.run.__annotations__, "plugin": Plugins}
    return run


for group, commands in GROUPS.items():
    for name, command in commands.items():
        register(group, name, command)
