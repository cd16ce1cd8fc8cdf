"""Commands without the extras that they need: one sentence that says which pip command brings what is missing."""

import json
import subprocess
import sys

import pytest

from headrace.cli.console import needing
from headrace.utils.errors import InputError

# Of each extra the packages that those before it do not bring.
EXTRAS = {
    "models": ("transformers", "accelerate", "matplotlib", "huggingface_hub", "tokenizers"),
    "train": ("omegaconf", "datasets", "tensorboard", "pandas", "pyarrow"),
    "serve": ("uvicorn", "starlette"),
    "eval": ("lm_eval", "html2text", "bs4", "sklearn"),
}
COMMANDS = {
    "compare --task pair --steps 1": "models",
    "bench": "models",
    "inspect model --text abc": "models",
    "generate model --prompt abc": "models",
    "convert model --output new": "models",
    "retrofit model --output new": "models",
    "prepare words.txt --output new": "train",
    "prepare --task mqar --output new": "train",
    "train laptop-1m --data data": "train",
    "train laptop-1m --dry-run": "train",
    "recipes": "train",
    "recipes --mixers gla": "train",
    "curves run": "train",
    "reproduce": "train",
    "reproduce table-3": "train",
    "serve model": "serve",
    "eval model --suite language": "eval",
    "zoo": None,
    "verify --mixers gla": None,
    "backends": None,
}
# Runs every command in one process, where packages are not found as if they were not installed.
RUN = """
import contextlib, importlib.machinery, io, json, sys

commands, missing = json.loads(sys.argv[1]), json.loads(sys.argv[2])
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *where: None if name.split(".")[0] in missing else find(name, *where)
)
from headrace.cli import main

ended = {}
for command in commands:
    sys.argv = ["headrace", *command.split()]
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            ended[command] = end.code or 0, said.getvalue()
        except BaseException as error:
            ended[command] = repr(error), said.getvalue()
print(json.dumps(ended))
"""


def run(commands, missing, folder):
    (folder / "words.txt").write_text("some words " * 100)
    arguments = [json.dumps(list(commands)), json.dumps(list(missing))]
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("installed", [(), ("models",), ("models", "train")], ids=lambda names: "+".join(names) or "no")
def test_a_command_says_which_extra_it_needs(installed, tmp_path):
    missing = [package for extra, packages in EXTRAS.items() if extra not in installed for package in packages]
    commands = {command: extra for command, extra in COMMANDS.items() if extra not in (*installed, None)}
    for command, (code, said) in run(commands, missing, tmp_path).items():
        name = command.split()[0]
        assert code == 2 and said.count("\n") == 1, (command, code, said)
        assert said.startswith(f"headrace: {name} needs "), (command, said)
        assert f'which is not installed: pip install "headrace[{commands[command]}]"' in said, (command, said)


def test_what_needs_no_extra_runs_without(tmp_path):
    missing = [package for packages in EXTRAS.values() for package in packages]
    ended = run([command for command, extra in COMMANDS.items() if extra is None], missing, tmp_path)
    assert {code for code, _ in ended.values()} == {0}, ended


def test_transformers_names_a_package_in_an_error_of_its_own(monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_accelerate_available", lambda *_: False)
    from transformers import TrainingArguments

    command = needing("train", "train", lambda: TrainingArguments("runs").device)
    with pytest.raises(InputError, match=r'train needs accelerate, .*: pip install "headrace\[train\]"'):
        command()


def test_an_import_that_fails_for_another_reason_is_not_hidden():
    def command():
        from headrace import nothing_of_this_name  # noqa: F401

    with pytest.raises(ImportError, match="cannot import name"):
        needing("train", "train", command)()
