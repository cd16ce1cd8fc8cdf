"""Without the extras that they need, commands and imports say in one sentence which pip command installs them."""

import ast
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

import fresh
from headrace.cli import app
from headrace.cli.console import needing
from headrace.utils import extras
from headrace.utils.errors import InputError
from lowest import lowest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headrace"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
COMMANDS = {name: command for commands in app.GROUPS.values() for name, command in commands.items()}
EVERYTHING = {package for names in extras.EXTRAS.values() for package in names}
OPTIONAL = EVERYTHING - {"pydantic"}  # which newer versions of Typer install
BROUGHT = {"packaging", "yaml", "jinja2", "pandas", "httpx"}  # by transformers, PyTorch, datasets, huggingface_hub 1
PARTS = {  # extra -> folders of the package that it is enough for
    "models": ("convert", "hf", "history/models"),
    "gguf": ("convert", "hf"),
    "studies": ("report", "inspection", "comparison", "benchmarking"),
    "train": ("data", "training", "training/recipes"),
    "serve": ("serving",),
}
# What processes in which no packages but those of [models] are found, or more of them, have imported.
MODELS = f"""
sys.path.append({str(ROOT / "tests")!r})
import without
without.hide({sorted(OPTIONAL - {*extras.packages("models"), *BROUGHT})})
import headrace.hf
"""
# Runs each line of Python, where packages are not found as if they were not installed.
RUN = f"""
import contextlib, io, json, shlex, sys

lines, missing = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.path.append({str(ROOT / "tests")!r})
import without
without.hide(missing)
import headrace
from headrace.cli import main

def run(command):
    sys.argv = ["headrace", *shlex.split(command)]
    main()

ended = []
for line in lines:
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            exec(line)
            ended.append(("done", ""))
        except SystemExit as end:
            ended.append((end.code or 0, said.getvalue() + shown.getvalue() * (end.code == 1)))
        except BaseException as error:
            ended.append((type(error).__name__, str(error)))
print(json.dumps(ended))
"""


def run(lines, missing, folder, before=""):
    said = fresh.output(RUN, json.dumps(list(lines)), json.dumps(list(missing)), folder=folder, before=before)
    return zip(lines, json.loads(said.splitlines()[-1]), strict=True)


@pytest.mark.parametrize("installed", [None, "models", "studies", "train"])
def test_command_names_the_missing_extra(installed, tmp_path):
    """Every command, with each of its examples and with no argument at all."""
    missing = OPTIONAL - set(extras.packages(installed) if installed else ())
    lacking = {name: c for name, c in COMMANDS.items() if c.extra and missing & set(extras.packages(c.extra))}
    examples = [f"{name} {example}" for name, c in lacking.items() for example in c.examples]
    assert examples
    for name in ("runs/laptop-5m-gla/model", "llama-checkpoint"):  # which the examples read
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "SmolLM2.gguf").touch()
    for line, (code, message) in run([f"run({line!r})" for line in examples], missing, tmp_path):
        name = re.findall(r"\w+", line)[1]
        assert code == 2 and message.count("\n") == 1, (line, code, message)
        needed = lacking[name].extra
        assert message == f"headrace: {name} needs {extras.named(needed)}\n", (line, message)


@pytest.mark.parametrize(("installed", "parts"), PARTS.items())
def test_commands_import_with_their_extra_alone(installed, parts, tmp_path):
    """What the commands of an extra import, where only that extra is installed."""
    files = [file for part in parts for file in (PACKAGE / part).glob("*.py")]
    files = [file for file in files if installed == "gguf" or file.stem != "gguf"]  # which has an extra of its own
    modules = sorted(f"headrace.{file.relative_to(PACKAGE).with_suffix('')}".replace("/", ".") for file in files)
    missing = OPTIONAL - {*extras.packages(installed), *BROUGHT}
    outcomes = run([f"import {module.removesuffix('.__init__')}" for module in modules], missing, tmp_path, MODELS)
    assert [(line, code) for line, (code, _) in outcomes if code != "done"] == [] and len(modules) > 4


def test_training_runs_without_matplotlib_and_tensorboard(tmp_path):
    """It says that it draws no curves, and the model card shows none."""
    (tmp_path / "text.txt").write_text("heads race for the water of one channel. " * 200)
    train = "train laptop-1m batch_tokens=128 tokens=256 warmup=0 layers=1 --data data --output run"
    commands = ["prepare text.txt --train-bpe 280 --length 64 --output data", train, "curves run"]
    lines = [f"with open('out', 'w') as out, contextlib.redirect_stdout(out): run({c!r})" for c in commands[:2]]
    missing = OPTIONAL - {*extras.packages("train"), *BROUGHT}
    lines.append(f"run({commands[2]!r})")
    prepared, trained, curves = (ended for _, ended in run(lines, missing, tmp_path, MODELS))
    assert prepared[0] == trained[0] == 0, (prepared, trained)
    no_curves = 'curves.png needs the extra [studies]: pip install "headrace[studies]"; then headrace'
    assert no_curves in (tmp_path / "out").read_text("utf-8")
    card = (tmp_path / "run" / "model" / "README.md").read_text("utf-8")
    assert "curves.png" not in card and "\n\n\n" not in card
    assert curves[0] == 2 and curves[1].endswith(f" needs {extras.named('studies,train')}\n")


def test_commands_without_extras_run_on_the_plain_install(tmp_path):
    free = [name for name, command in COMMANDS.items() if command.extra is None]
    lines = [f"run({name!r})" for name in free if name != "verify"] + ["run('verify --mixers gla')"]
    lines += [f"run({f'{name} --help'!r})" for name in COMMANDS]
    outcomes = run(lines, OPTIONAL, tmp_path)
    assert [(line, ended) for line, ended in outcomes if ended[0] != 0] == []


NEEDED = {  # by a package: a line that needs it, and what then misses it in which extra
    "sklearn": ("run('compare --task digits --output run')", "the task digits", "eval"),
    "wonderwords": ("run('compare --task needle(length=64) --output run')", "the task needle", "eval"),
    **{
        name: (f"from headrace.training import run; run.check_trackers('{name}')", f"--trackers={name}", name)
        for name in ("tensorboard", "wandb", "trackio")
    },
}


def test_tasks_and_trackers_name_the_missing_extra(tmp_path):
    pytest.importorskip("datasets", reason="the extra [train] is not installed")
    outcomes = run([line for line, *_ in NEEDED.values()], NEEDED, tmp_path, MODELS)
    for (_, user, extra), (_, (code, message)) in zip(NEEDED.values(), outcomes, strict=True):
        assert code in (2, "MissingPackage")
        sentence = f'{user} needs the extra [{extra}]: pip install "headrace[{extra}]"'
        assert message.removeprefix("headrace: ").rstrip("\n") == sentence


def test_import_names_the_missing_extra(tmp_path):
    """The op, the layer and `verify` need none."""
    import headrace

    parts = dict.fromkeys((f"import headrace.{part}" for part in ("hf", "history.models", "data", "tasks")), "models")
    public = {
        f"headrace.{name}": "models" if headrace._LAZY.get(name) in ("hf", "convert", "files.state") else None
        for name in headrace.__all__
    }
    needs = parts | public
    for line, (error, message) in run(needs, OPTIONAL, tmp_path):
        expected = "done" if needs[line] is None else "MissingPackage"
        assert error == expected, (line, message)
        assert error == "done" or message.endswith(f" needs {extras.named(needs[line])}"), (line, message)
    assert needs["headrace.Mixer"] is needs["headrace.linear_attention"] is needs["headrace.verify"] is None


def test_readme_example_names_the_missing_extra(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    op, mixer = run([f"exec({block!r})" for block in blocks], OPTIONAL, tmp_path)
    assert op[1] == ["done", ""]
    assert mixer[1] == ["MissingPackage", f"headrace.HeadraceConfig needs {extras.named('models')}"]
    assert 'pip install ".[models]"' in blocks[1]


def test_install_page_lists_every_extra():
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    rows = "\n".join(re.findall(r"^\| .*", page, re.MULTILINE))
    assert {*re.findall(r'"\.\[(\w+)\]"', rows)} == {*PROJECT["optional-dependencies"]} - {"docs"}  # which is in dev


def test_missing_package_is_an_import_error():
    with pytest.raises(ImportError, match=r"it needs the extra \[models\]: pip install") as caught:
        extras.require_packages("it", "no_such_package", extra="models")
    assert isinstance(caught.value, InputError)


def test_other_import_errors_are_not_hidden():
    with pytest.raises(ImportError, match="cannot import name"), needing(None, "train"):
        from headrace import nothing_of_this_name  # noqa: F401


def test_every_package_has_one_lowest_version():
    """Which `make test-lowest` installs. [dev], [docs] and vLLM are installed by nobody else at versions of theirs."""
    extras_ = [name for name in PROJECT["optional-dependencies"] if name not in ("dev", "docs")]
    found = sorted(set(lowest(PROJECT["dependencies"] + [f"headrace[{','.join(extras_)}]"])))
    assert [name for name, version in found if version is None] == []
    assert len({name for name, _ in found}) == len(found), found


LACKING = """
import pytest
from headrace.utils.extras import MissingPackage, named, require_packages

@pytest.fixture
def absent():
    import matplotlib

def test_skipped_import(): import peft
def test_skipped_fixture(absent): pass
def test_skipped_function(): require_packages("this", "matplotlib")
def test_skipped_command(run_command): run_command("curves", ".")

def test_failed_name(): import peftt
def test_failed_function(): raise MissingPackage(f"this needs {named('models')}")
def test_failed_command(run_command, monkeypatch):
    monkeypatch.setattr("headrace.utils.extras.find_spec", lambda name: None)
    assert run_command("generate", ".").code == 0
"""


@pytest.mark.slow(seconds=10)
def test_only_tests_of_packages_that_are_not_installed_are_skipped(tmp_path):
    (tmp_path / "test_module.py").write_text("import peft")
    (tmp_path / "test_lacking.py").write_text(LACKING)
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "benchmarks"))
    plugins = [f"-p{name}" for name in ("without", "conftest", "no:cacheprovider", "no:xdist")]
    variables = {"HEADRACE_WITHOUT": "peft,matplotlib", "PYTHONPATH": paths}
    done = fresh.pytest(*plugins, "-rfs", "--tb=no", folder=tmp_path, **variables)
    assert "3 failed, 5 skipped" in done.stdout, done.stdout
    assert {*re.findall("FAILED .*::(test_[a-z]*)", done.stdout)} == {"test_failed"}
    for reason in ("No module named 'peft'", "this needs the extra [studies]", "curves needs the extras [studies]"):
        assert reason in done.stdout, done.stdout


def test_extras_match_pyproject():
    """Every extra, what it includes, and every package that a module imports."""
    declared = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name not in ("dev", "docs")}
    assert set(extras.EXTRAS) == set(declared)
    for name, needs in declared.items():
        included = [need for need in needs if need.startswith("headrace[")]
        assert included == ([f"headrace[{extras.INCLUDES[name]}]"] if name in extras.INCLUDES else [])
    basic = {"torch", "numpy", "typer", "rich", "filelock", "headrace"}
    # by PyTorch, pydantic, jinja2, datasets and uvicorn
    brought = {"triton", "pydantic_core", "markupsafe", "pyarrow", "fsspec", "tqdm", "h11"}
    assert imported() - EVERYTHING - brought <= basic | set(sys.stdlib_module_names)
    named = {extra for command in COMMANDS.values() if command.extra for extra in command.extra.split(",")}
    assert named <= set(extras.EXTRAS)


def imported():
    nodes = [n for path in (ROOT / "src").rglob("*.py") for n in ast.walk(ast.parse(path.read_text("utf-8")))]
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {name.split(".")[0] for name in names}
