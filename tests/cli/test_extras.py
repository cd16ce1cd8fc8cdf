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
from headrace.tasks import digits, needle
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
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True)


@pytest.mark.parametrize("installed", [None, "models"])
def test_a_command_says_which_extra_it_needs(installed, tmp_path):
    """Every command, with each of its examples and with no argument at all."""
    missing = OPTIONAL - set(extras.packages(installed) if installed else ())
    lacking = {name: c for name, c in COMMANDS.items() if c.extra and missing & set(extras.packages(c.extra))}
    examples = [f"{name} {example}" for name, c in lacking.items() for example in c.examples]
    assert examples
    for line, (code, said) in run([f"run({line!r})" for line in examples], missing, tmp_path):
        name = re.findall(r"\w+", line)[1]
        assert code == 2 and said.count("\n") == 1, (line, code, said)
        assert said.startswith(f"headrace: {name} needs "), (line, said)
        assert said.endswith(f' not installed: pip install "headrace[{lacking[name].extra}]"\n'), (line, said)


def test_the_extra_of_a_command_is_enough(tmp_path):
    """What compare, bench, inspect, generate, convert and retrofit import, where only [models] is installed."""
    parts = ("studies/compare", "studies/bench", "studies/inspect", "hf/convert", "hf", "models")
    files = {file for part in parts for file in (PACKAGE / part).glob("*.py")}
    modules = sorted(f"headrace.{file.relative_to(PACKAGE).with_suffix('')}".replace("/", ".") for file in files)
    missing = OPTIONAL - {*extras.packages("models"), "packaging"}  # which transformers installs
    ended = run([f"import {module.removesuffix('.__init__')}" for module in modules], missing, tmp_path)
    assert [(line, said) for line, (code, said) in ended if code != "done"] == [] and len(modules) > 40


def test_what_needs_no_extra_runs_without(tmp_path):
    free = [name for name, command in COMMANDS.items() if command.extra is None]
    lines = [f"run({name!r})" for name in free if name != "verify"] + ["run('verify --mixers gla')"]
    lines += [f"run({f'{name} --help'!r})" for name in COMMANDS]
    ended = run(lines, OPTIONAL, tmp_path)
    assert [(line, code) for line, (code, _) in ended if code != 0] == []


@pytest.mark.parametrize(("task", "package"), [("digits", "sklearn"), ("needle(length=64)", "wonderwords")])
def test_a_task_says_which_extra_it_needs(task, package, monkeypatch, tmp_path, capsys):
    pytest.importorskip("datasets", reason="the extra [train] is not installed")
    for cached in (digits.load, needle.vocabulary):
        cached.cache_clear()
    find = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.setattr(sys, "argv", ["headrace", "compare", "--task", task, "--output", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="2"):
        app.main()
    who = f"the task {task.partition('(')[0]}"
    said = f'headrace: {who} needs {package}, which is not installed: pip install "headrace[eval]"\n'
    assert capsys.readouterr().err == said


def test_an_import_says_which_extra_it_needs(tmp_path):
    import headrace

    parts = {"headrace.hf": "models", "headrace.models": "models", "headrace.data": "train"}
    lines = [f"import {part}" for part in parts] + [f"headrace.{name}" for name in headrace.__all__]
    for line, (error, said) in run(lines, OPTIONAL, tmp_path):
        extra = parts.get(line.removeprefix("import "), "models")
        assert error in ("done", "MissingPackage"), (line, said)
        assert error == "done" or said.endswith(f'not installed: pip install "headrace[{extra}]"'), (line, said)
        assert error == "MissingPackage" or line not in [f"import {part}" for part in parts], line


def test_the_example_of_the_readme_names_the_extra(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    op, mixer = run([f"exec({block!r})" for block in blocks], OPTIONAL, tmp_path)
    assert op[1] == ["done", ""]
    assert mixer[1] == [
        "MissingPackage",
        'headrace.HeadraceConfig needs transformers, which is not installed: pip install "headrace[models]"',
    ]
    assert 'pip install ".[models]"' in blocks[1]


def test_the_install_page_has_every_extra():
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    listed = {
        extra for line in re.findall(r"^\| .*", page, re.MULTILINE) for extra in re.findall(r'"\.\[(\w+)\]"', line)
    }
    assert listed == {*PROJECT["optional-dependencies"]} - {"docs"}  # which is in dev


def test_a_tracker_says_which_extra_it_needs(monkeypatch):
    trackers = pytest.importorskip("headrace.training.run", reason="the extra [train] is not installed")
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"--trackers=wandb needs wandb, .*headrace\[wandb\]"):
        trackers.check_trackers("wandb")


def test_a_missing_package_is_an_import_error():
    with pytest.raises(ImportError, match="it needs no_such_package") as caught:
        extras.require("it", "no_such_package", extra="models")
    assert isinstance(caught.value, InputError)


def test_an_import_that_fails_for_another_reason_is_not_hidden():
    def command():
        from headrace import nothing_of_this_name  # noqa: F401

    with pytest.raises(ImportError, match="cannot import name"):
        app.requiring_extra(None, "train", command)()


def test_the_table_is_that_of_the_project():
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
