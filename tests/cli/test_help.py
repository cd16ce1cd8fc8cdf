"""What the command line says about itself: groups, examples, defaults, completion, and usage errors."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli import app as cli
from headrace.comparison.defaults import PAIR

GROUPS = {
    "Compare": ["compare", "zoo", "verify", "backends"],
    "Train": ["prepare", "train", "curves", "recipes"],
    "Evaluate": ["eval", "bench"],
    "Understand": ["inspect"],
    "Use": ["generate", "serve", "convert", "export", "retrofit", "linearize"],
}
COMMANDS = typer.main.get_command(cli.app).commands
NAMES = list(COMMANDS)
FROM_TASK = {
    "steps": PAIR.recipe.steps, "batch_size": PAIR.recipe.batch_size, "lr": PAIR.recipe.lr, "length": PAIR.task.length,
    "hidden_size": PAIR.shape.hidden_size, "layers": PAIR.shape.layers, "heads": PAIR.shape.heads, "seeds": PAIR.seeds,
}  # fmt: skip
USAGE = {
    "frobnicate": "No such command 'frobnicate' (try `headrace --help`)",
    "comapre": "No such command 'comapre'. Did you mean 'compare'? (try `headrace --help`)",
    "--bogus": "No such option: --bogus (try `headrace --help`)",
    "compare --bogus 3": "No such option: --bogus (try `headrace compare --help`)",
    "compare --steps x": "Invalid value for '--steps': ",
    "convert model": "Missing option '--output' (try `headrace convert --help`)",
}


ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
BLOCKS = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL)]
DOCUMENTED = re.findall(r"^headrace (\w.*)", "\n".join(BLOCKS).replace("\\\n", " "), re.MULTILINE)


def parsed(words):
    """Parses the words after `headrace` without running the command."""
    command, *arguments = words
    return COMMANDS[command].make_context(command, arguments)


def test_commands_are_grouped_and_compare_comes_first():
    assert NAMES[0] == "compare"
    assert {group: [n for n in NAMES if COMMANDS[n].rich_help_panel == group] for group in GROUPS} == GROUPS
    shown = re.sub(r"\x1b\[[\d;]*m", "", CliRunner().invoke(cli.app, ["--help"]).output)
    places = [shown.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_examples_that_parse(name):
    examples = re.findall(r"^headrace .*", COMMANDS[name].epilog or "", re.MULTILINE)
    assert examples
    for example in examples:
        _, *words = shlex.split(example)
        assert words[0] == name and parsed(words)
        assert len(example) <= 78, "one line of a terminal of 80 columns, without the margins"


@pytest.mark.parametrize("command", DOCUMENTED)
def test_every_documented_command_parses(command):
    assert parsed(shlex.split(command, comments=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_help_text_that_shows_its_default(name):
    parameters = [parameter for parameter in COMMANDS[name].params if parameter.name != "help"]
    for parameter in parameters:
        text = parameter.help or ""
        assert text[:1].isupper() and "." in text, parameter.name
        assert parameter.required or parameter.default is not None or r"\[default: " in text, parameter.name
    shown = CliRunner().invoke(cli.app, [name, "--help"])
    written = sum(r"\[default: " in parameter.help for parameter in parameters)
    assert shown.exit_code == 0 and re.sub(r"\x1b\[[\d;]*m", "", shown.output).count("[default:") >= written


def test_defaults_of_compare_come_from_the_pair_task():
    helps = {parameter.name: parameter.help for parameter in COMMANDS["compare"].params}
    for name, value in FROM_TASK.items():
        assert helps[name].endswith(rf"\[default: {value:g}]"), name


@pytest.mark.parametrize("arguments", USAGE)
def test_usage_errors_are_one_sentence_with_the_help_command(arguments, run_command):
    code, out, error = run_command(*arguments.split())
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(f"headrace: {USAGE[arguments]}") and error.endswith("--help`)\n")


def test_no_arguments_show_the_help(run_command):
    code, out, error = run_command()
    assert not code and "Compare" in out and not error


MODULES = """
import contextlib, io, json, sys
from headrace.cli import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["headrace", *words]
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main()
    print(json.dumps([words, len(shown.getvalue()), sorted(sys.modules)]))
"""
HEAVY = ("torch", "transformers", "datasets", "numpy", "matplotlib", "scipy", "lm_eval", "starlette", "uvicorn")


def test_help_and_lists_do_not_import_torch():
    """One after the other in one process, as what one of them imports stays. `zoo` describes the mixers of plug-ins
    too, which are files with a layer."""
    commands = [["--help"], *([name, "--help"] for name in NAMES), *([["recipes"]] if find_spec("yaml") else [])]
    run = [sys.executable, "-c", MODULES, json.dumps(commands)]
    rows = list(map(json.loads, subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()))
    assert [words for words, *_ in rows] == commands
    for words, length, modules in rows:
        assert length and not {*HEAVY, "headrace.hf"} & set(modules), words


def test_shell_completion_works(tmp_path):
    script = tmp_path / "headrace"
    script.write_text(f"#!{sys.executable}\nfrom headrace.cli import main\nmain()\n")
    script.chmod(0o755)
    environment = os.environ | {
        "HOME": str(tmp_path), "SHELL": "/bin/bash", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }  # fmt: skip

    def run(*arguments, **more):
        how = {"capture_output": True, "text": True, "check": True, "env": environment | more}
        return subprocess.run([script, *arguments], **how).stdout

    assert "_HEADRACE_COMPLETE=complete_bash" in run("--show-completion", "bash")
    run("--install-completion", "bash")
    assert "headrace" in (tmp_path / ".bashrc").read_text()
    completed = run(_HEADRACE_COMPLETE="complete_bash", COMP_WORDS="headrace re", COMP_CWORD="1")
    assert completed.split() == ["recipes", "retrofit"]
