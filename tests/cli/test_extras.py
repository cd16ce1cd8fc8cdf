"""Without the extras that they need, commands and imports say in one sentence which pip command installs them."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.cli import app
from headrace.utils import extras
from headrace.utils.errors import InputError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headrace"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
COMMANDS = {name: command for commands in app.GROUPS.values() for name, command in commands.items()}
EVERYTHING = {package for names in extras.EXTRAS.values() for package in names}
OPTIONAL = EVERYTHING - {"pydantic"}  # which newer versions of Typer install
# Runs each line of Python in one process, where packages are not found as if they were not installed.
RUN = """
import contextlib, importlib.machinery, io, json, shlex, sys

lines, missing = json.loads(sys.argv[1]), json.loads(sys.argv[2])
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *where: None if name.split(".")[0] in missing else find(name, *where)
)
import headrace
from headrace.cli import main

def run(command):
    sys.argv = ["headrace", *shlex.split(command)]
    main()

ended = []
for line in lines:
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(line)
            ended.append(("done", ""))
        except SystemExit as end:
            ended.append((end.code or 0, said.getvalue()))
        except BaseException as error:
            ended.append((type(error).__name__, str(error)))
print(json.dumps(ended))
"""


def run(lines, missing, folder):
    arguments = [json.dumps(list(lines)), json.dumps(list(missing))]
    result = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr[-2000:]
    return zip(lines, json.loads(result.stdout.splitlines()[-1]), strict=True)


@pytest.mark.parametrize("installed", [None, "models"])
def test_command_names_the_missing_extra(installed, tmp_path):
    """Every command, with each of its examples and with no argument at all."""
    missing = OPTIONAL - set(extras.packages(installed) if installed else ())
    lacking = {name: c for name, c in COMMANDS.items() if c.extra and missing & set(extras.packages(c.extra))}
    examples = [f"{name} {example}" for name, c in lacking.items() for example in c.examples]
    assert examples
    for line, (code, message) in run([f"run({line!r})" for line in examples], missing, tmp_path):
        name = re.findall(r"\w+", line)[1]
        assert code == 2 and message.count("\n") == 1, (line, code, message)
        assert message.startswith(f"headrace: {name} needs "), (line, message)
        assert message.endswith(f' not installed: pip install "headrace[{lacking[name].extra}]"\n'), (line, message)


def test_commands_import_with_their_extra_alone(tmp_path):
    """What compare, bench, inspect, generate, convert and retrofit import, where only [models] is installed."""
    parts = ("studies/compare", "studies/bench", "studies/inspect", "hf/convert", "hf", "models")
    files = {file for part in parts for file in (PACKAGE / part).glob("*.py")}
    modules = sorted(f"headrace.{file.relative_to(PACKAGE).with_suffix('')}".replace("/", ".") for file in files)
    missing = OPTIONAL - {*extras.packages("models"), "packaging"}  # which transformers installs
    outcomes = run([f"import {module.removesuffix('.__init__')}" for module in modules], missing, tmp_path)
    assert [(line, message) for line, (code, message) in outcomes if code != "done"] == [] and len(modules) > 40


def test_commands_without_extras_run_on_the_plain_install(tmp_path):
    free = [name for name, command in COMMANDS.items() if command.extra is None]
    lines = [f"run({name!r})" for name in free if name != "verify"] + ["run('verify --mixers gla')"]
    lines += [f"run({f'{name} --help'!r})" for name in COMMANDS]
    outcomes = run(lines, OPTIONAL, tmp_path)
    assert [(line, code) for line, (code, _) in outcomes if code != 0] == []


NEEDED = {  # by a package: a line that needs it, and what then misses it in which extra
    "sklearn": ("run('compare --task digits --output run')", "the task digits", "eval"),
    "wonderwords": ("run('compare --task needle(length=64) --output run')", "the task needle", "eval"),
    "wandb": ("from headrace.training import run; run.check_trackers('wandb')", "--trackers=wandb", "wandb"),
}


def test_tasks_and_trackers_name_the_missing_extra(tmp_path):
    pytest.importorskip("datasets", reason="the extra [train] is not installed")
    outcomes = run([line for line, *_ in NEEDED.values()], NEEDED, tmp_path)
    for (package, (_, user, extra)), (_, (code, message)) in zip(NEEDED.items(), outcomes, strict=True):
        assert code in (2, "MissingPackage")
        sentence = f'{user} needs {package}, which is not installed: pip install "headrace[{extra}]"'
        assert message.removeprefix("headrace: ").rstrip("\n") == sentence


def test_import_names_the_missing_extra(tmp_path):
    import headrace

    parts = {"headrace.hf": "models", "headrace.models": "models", "headrace.data": "train"}
    lines = [f"import {part}" for part in parts] + [f"headrace.{name}" for name in headrace.__all__]
    for line, (error, message) in run(lines, OPTIONAL, tmp_path):
        extra = parts.get(line.removeprefix("import "), "models")
        assert error in ("done", "MissingPackage"), (line, message)
        assert error == "done" or message.endswith(f'not installed: pip install "headrace[{extra}]"'), (line, message)
        assert error == "MissingPackage" or line not in [f"import {part}" for part in parts], line


def test_readme_example_names_the_missing_extra(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    op, mixer = run([f"exec({block!r})" for block in blocks], OPTIONAL, tmp_path)
    assert op[1] == ["done", ""]
    assert mixer[1] == [
        "MissingPackage",
        'headrace.HeadraceConfig needs transformers, which is not installed: pip install "headrace[models]"',
    ]
    assert 'pip install ".[models]"' in blocks[1]


def test_missing_package_is_an_import_error():
    with pytest.raises(ImportError, match="it needs no_such_package") as caught:
        extras.require("it", "no_such_package", extra="models")
    assert isinstance(caught.value, InputError)


def test_other_import_errors_are_not_hidden():
    def command():
        from headrace import nothing_of_this_name  # noqa: F401

    with pytest.raises(ImportError, match="cannot import name"):
        app.needing(None, "train", command)()


def test_extras_match_pyproject():
    """Every extra, what it includes, and every package that a module imports."""
    declared = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name not in ("dev", "docs")}
    assert set(extras.EXTRAS) == set(declared)
    for name, needs in declared.items():
        included = [need for need in needs if need.startswith("headrace[")]
        assert included == ([f"headrace[{extras.INCLUDES[name]}]"] if name in extras.INCLUDES else [])
    basic = {"torch", "numpy", "safetensors", "typer", "rich", "filelock", "headrace"}
    # by PyTorch, pydantic, jinja2, datasets and uvicorn
    brought = {"triton", "pydantic_core", "markupsafe", "pyarrow", "fsspec", "tqdm", "h11"}
    assert imported() - EVERYTHING - brought <= basic | set(sys.stdlib_module_names)
    assert {command.extra for command in COMMANDS.values()} - {None} <= set(extras.EXTRAS)


def imported():
    nodes = [n for path in (ROOT / "src").rglob("*.py") for n in ast.walk(ast.parse(path.read_text("utf-8")))]
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {name.split(".")[0] for name in names}
