"""Plug-ins: what the page of plug-ins shows works in every command and process, and what is wrong with one is said."""

import hashlib
import json
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path, PureWindowsPath
from unittest.mock import patch

import pytest
import torch

import headrace
from headrace import layers, load, zoo
from headrace.files import workers
from headrace.spec.serialize import TYPES
from headrace.tasks import TASKS
from headrace.utils import plugins
from headrace.utils.errors import InputError, PluginWarning, VersionWarning
from headrace.utils.plugins import VARIABLE
from plugged import COMMANDS, FILES, folder, forget
from served import connect, save, serving
from sharded import Run, train_all
from tiny import build, in_memory

__all__ = ["folder"]  # a fixture
assert workers  # so that conftest.py has workers of `compare` forked


def checkpoint(folder, mixer):
    """The folder of a small model, of whose plug-ins this process then knows nothing."""
    plugins.load(["leaky.py", "fading.py"])
    save(folder / mixer, 257, mixer=mixer, num_hidden_layers=1)
    forget()
    return folder / mixer


SMALL = ("hidden_size=16", "layers=1", "heads=2", "vocab_size=257", "intermediate_size=16", "length=32")
BENCH = ("--layers", 1, "--hidden-size", 16, "--lengths", 16, "--batch-sizes", 1, "--contexts", 16, "--rounds", 1)


@pytest.mark.parametrize(
    "words",
    [
        ("zoo", "--json"),
        ("verify", "--mixers", "leaky"),
        ("recipes", "--mixers", "fading-hybrid"),
        ("train", "laptop-5m", "--mixer", "leaky(slowest=0.9)", "--dry-run", *SMALL),
        ("prepare", "--task", "majority(length=12)", "--rows", 40, "--output", "rows"),
        ("bench", "--mixers", "leaky", "--what", "training,prefill,decoding", *BENCH),
    ],
    ids=lambda words: words[0],
)
def test_commands_know_names_of_plug_ins(folder, run_command, words):
    command, *options = words
    result = run_command(command, "--plugin", "leaky.py", "--plugin", "fading.py", "--plugin", "majority.py", *options)
    assert result.code == 0, result.err
    if command == "zoo":
        rows = json.loads(result.out)
        assert rows["leaky"]["numbers"] == 1024 and rows["softmax-fading-delta"]["competes"] and "fading-hybrid" in rows
    if command == "bench":
        made = json.loads((folder / "runs" / "bench" / "made-by.json").read_text("utf-8"))
        assert made[-1]["plugin leaky.py"] == f"sha256 {plugins.LOADED[str(folder / 'leaky.py')].sha256[:12]}"
        assert "plugin leaky.py sha256" in (folder / "runs" / "bench" / "report.html").read_text("utf-8")


REFUSED = {
    "export": (("--to", "onnx", "--output", "out"), "its mixer is ModuleMixer, without nodes in ONNX"),
    "convert": (("--to", "gla", "--output", "out"), "; expected 'linear'"),
    "retrofit": (("--output", "out"), "has no layer of linear attention"),
}
TAKEN = {
    "generate": ("--prompt", "It", "--max-new-tokens", 3),
    "inspect": ("--file", "leaky.py", "--tokens", 9, "--output", "out"),
}


@pytest.mark.parametrize("command", [*TAKEN, *REFUSED, "eval", "serve"])
def test_commands_take_the_checkpoint_of_a_plug_in_and_name_it_if_it_is_missing(folder, run_command, command):
    model = checkpoint(folder, "leaky")
    arguments, refusal = REFUSED.get(command, (TAKEN.get(command, ()), ""))
    if command == "eval":
        (folder / "wiki.test.raw").write_text(" = A = \n \n It is . It is . It is . \n")
        (folder / "lambada_openai.jsonl").write_text('{"text": "she saw the sea"}\n')
        arguments = ("--suite", "wikitext", "--data", ".", "--max-length", 16)
    sha256 = plugins.sha256(folder / "leaky.py")[:12]
    result = run_command(command, model, *arguments)
    assert result.code == 2 and result.err.count("mixer 'leaky' is of the plug-in") == 1, result.err
    assert f"leaky.py (sha256 {sha256}), and the loaded plug-ins are none; expected --plugin" in result.err
    if command == "serve":  # which would not end
        plugins.load(["leaky.py"])
        with serving(str(model)) as base:
            answer = connect(base).completions.create(model=str(model), prompt=["It", "was it"], max_tokens=4)
        assert len(answer.choices) == 2
        return
    result = run_command(command, "--plugin", "leaky.py", model, *arguments)
    assert result.code == (2 if refusal else 0) and refusal in result.err and "plug-in" not in result.err, result.err


def test_checkpoint_of_a_spec_needs_no_plug_in(folder, run_command):
    model = checkpoint(folder, "softmax-fading-delta")
    assert run_command("generate", model, "--prompt", "It", "--max-new-tokens", 3).code == 0


def test_loaded_model_computes_the_same_and_a_changed_file_is_said(folder):
    plugins.load(["leaky.py"])
    model = build("leaky(slowest=0.7)").float()
    model.save_pretrained("model")
    ids = torch.arange(24).view(2, 12)
    expected = model(ids).logits
    assert model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 16)
    forget()
    (folder / "leaky.py").write_text("import math\n" + FILES["leaky.py"], "utf-8")
    with (
        patch.dict(os.environ, {VARIABLE: "leaky.py"}),
        pytest.warns(PluginWarning, match="is of leaky.py .* now runs"),
    ):
        again = in_memory(load("model"))
    assert torch.equal(again(ids).logits, expected)


def test_comparison_of_the_page(folder, succeeds, monkeypatch):
    """Named by the environment, with a worker that has loaded none of the plug-ins."""
    comparison = next(words for words in COMMANDS if words.startswith("compare"))
    words = [word for word in comparison.split() if not word.endswith(".py")]
    words = [word for word in words if word != "--plugin"] + ["--hidden-size", "16", "--steps", "4"]
    words.remove("20"), words.remove("--steps")
    monkeypatch.setenv(VARIABLE, os.pathsep.join(FILES))
    succeeds(*words)
    report = (folder / "majority" / "report.html").read_text("utf-8")
    assert "Whether most tokens so far are ones." in report and "Uniform guesses score 50.0 %." in report
    assert re.search(r"input  ( [01]){16}\nanswer ( [01]){16}", report)
    assert all(f"plugin {name} sha256 {plugins.sha256(folder / name)[:12]}" in report for name in FILES)


def test_all_processes_of_a_run_know_plug_ins(folder, prepared):
    """As torchrun starts them: each with the words of the command."""
    changes = {"mixer": "leaky", "tokens": 256, "save_every": 2, "evaluate_every": 2, "evaluate_rows": 2}
    run = Run(folder / "run", changes, options=("--plugin", str(folder / "leaky.py")))
    assert train_all([run], prepared, 2) == [0, 0]
    assert "plugin leaky.py sha256" in (folder / "run" / "model" / "README.md").read_text("utf-8")
    mixer = json.loads((folder / "run" / "model" / "config.json").read_text("utf-8"))["mixer"]
    assert (mixer["type"], mixer["plugin"], len(mixer["sha256"])) == ("module:leaky", "leaky.py", 64)


def test_results_of_a_changed_plug_in_are_continued_with_a_warning(folder, succeeds):
    words = ("bench", "--plugin", "leaky.py", "--mixers", "gla", "--what", "prefill", *BENCH, "--output", "out")
    succeeds(*words)
    forget()
    (folder / "leaky.py").write_text(FILES["leaky.py"] + "\n", "utf-8")
    versions = r"made by plugin leaky.py sha256 \w{12}; now runs plugin leaky.py sha256 \w{12}, and the report"
    with pytest.warns(VersionWarning, match=versions):
        succeeds(*words)


def test_installed_plug_ins_load_by_their_entry_points(folder, run_command, monkeypatch):
    (folder / "site" / "my_package").mkdir(parents=True)
    (folder / "site" / "my_package" / "__init__.py").write_text("from .mixers import register\n\nregister()\n")
    body = "".join(f"    {line}\n" for line in FILES["leaky.py"].splitlines())
    (folder / "site" / "my_package" / "mixers.py").write_text(f"def register():\n{body}")
    about = folder / "site" / "my_package-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[headrace.plugins]\nmine = my_package\n")
    monkeypatch.syspath_prepend(folder / "site")
    assert layers.Mixer("leaky", hidden_size=8).spec.plugin == "my_package" and list(plugins.LOADED) == ["my_package"]
    (folder / "site" / "my_package" / "mixers.py").write_text("register = int\n")
    forget()
    for name in ("my_package", "my_package.mixers"):
        del sys.modules[name]
    sentence = "plug-in 'my_package' (entry point 'mine' of headrace.plugins) cannot be loaded: it registers nothing"
    assert sentence in run_command("zoo").err


def test_package_that_a_program_has_imported_is_a_plug_in(folder, monkeypatch):
    (folder / "site" / "their_package").mkdir(parents=True)
    (folder / "site" / "their_package" / "__init__.py").write_text("from . import mixers\n")
    shutil.copy("leaky.py", folder / "site" / "their_package" / "mixers.py")
    monkeypatch.syspath_prepend(folder / "site")
    with patch.dict(sys.modules):
        import_module("their_package")
        plugins.load(["their_package"])
    assert list(plugins.LOADED) == ["their_package"]
    spec = zoo.get("leaky")  # of a class that no loading defined
    assert plugins.Plugin(spec.plugin, spec.sha256) == plugins.LOADED["their_package"]


@pytest.mark.parametrize("first", ["__init__.py", "plug.py"])
def test_a_submodule_has_the_digest_of_its_package(folder, monkeypatch, first):
    """Whichever of its files registers: what a class of the submodule computes may be in any of them."""
    package = folder / "site" / "parts"
    package.mkdir(parents=True)
    for name in ("__init__.py", "plug.py", "other.py"):
        (package / name).write_text(FILES["leaky.py"] if name == first else "", "utf-8")
    monkeypatch.syspath_prepend(folder / "site")
    found = []
    for text in ("", "x = 1\n"):
        (package / "other.py").write_text(text, "utf-8")
        with patch.dict(sys.modules):
            plugins.load(["parts.plug"])
        found.append(plugins.LOADED["parts.plug"].sha256)
        assert zoo.get("leaky").sha256 == found[-1]
        forget()
    assert len({*found}) == 2 and found[1] == plugins._sha256(package / "__init__.py")


def test_digest_of_a_package_is_that_of_every_system(folder, monkeypatch):
    """The folders of a name are divided by /, as no system but Windows does by itself, and A is before a."""
    files = {
        "a/one.py": "x = 1\n",
        "B.py": "",
        "__init__.py": "import headrace\nheadrace.register_mixer('mine', 'gla')",
    }
    for name, text in files.items():
        (folder / "site" / "many_files" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / "many_files" / name).write_text(text, "utf-8")
    monkeypatch.syspath_prepend(folder / "site")
    relative_to = Path.relative_to
    monkeypatch.setattr(Path, "relative_to", lambda path, to: PureWindowsPath(relative_to(path, to)))
    with patch.dict(sys.modules):
        plugins.load(["many_files"])
    listed = [[name, hashlib.sha256(files[name].encode()).hexdigest()] for name in ("B.py", "__init__.py", "a/one.py")]
    assert plugins.LOADED["many_files"].sha256 == hashlib.sha256(json.dumps(listed).encode()).hexdigest()


# --- what is wrong with a plug-in ------------------------------------------------------------------------------------
BAD = {
    "x = 1\n\nraise_me()\n": "cannot be loaded: NameError: name 'raise_me' is not defined (line 3)",
    "def f(:\n": "cannot be loaded: SyntaxError: invalid syntax (line 1)",
    "import nowhere\n": "cannot be loaded: ModuleNotFoundError: No module named 'nowhere' (line 1)",
    "import sys; sys.exit()\n": "cannot be loaded: SystemExit (line 1)",
    "x = 1\n": "it registers nothing; expected a call of register_mixer, register_model or register_task",
    "import headrace\nheadrace.register_mixer('gla', 'gla')\n": "'gla' exists already; expected another name (line 2)",
    "import headrace\nheadrace.register_mixer('rnn-norm', 'gla')\n": "'softmax-rnn-norm' exists already",
    "import headrace\nheadrace.register_model('my-hybrid', 'gla')\n": "is the mixer of one layer; expected a whole",
    "import headrace\nheadrace.register_mixer('hybrid', 'gla+gla')\n": "is a whole model; expected a mixer",
    "import headrace\nheadrace.register_mixer('a(b)', 'gla')\n": "mixer 'a(b)' has no name for expressions",
    "import headrace\nheadrace.register_mixer('all', 'gla')\n": "mixer 'all' has no name for expressions",
    "import headrace\nheadrace.register_mixer('mine', 7)\n": "mixer=7; expected a name of the zoo",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_plug_in_is_one_sentence(folder, run_command, text):
    (folder / "mine.py").write_text(text)
    code, out, error = run_command("zoo", "--plugin", "mine.py")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("headrace: plug-in 'mine.py' (--plugin) cannot be loaded: ") and BAD[text] in error


def test_path_that_the_variable_would_split_is_refused(folder):
    (folder / f"a{os.pathsep}b").mkdir()
    shutil.move("leaky.py", folder / f"a{os.pathsep}b")
    with pytest.raises(InputError, match=f"has '{os.pathsep}', which divides {VARIABLE}; expected none"):
        plugins.load([f"a{os.pathsep}b/leaky.py"])
    assert not plugins.LOADED and VARIABLE not in os.environ


def test_what_a_plug_in_has_registered_before_it_fails_is_forgotten(folder):
    """The file, corrected, is executed again in a notebook. What the notebook has registered stays."""
    headrace.register_mixer("theirs", "gla")
    (folder / "mine.py").write_text(FILES["leaky.py"] + FILES["majority.py"] + "\nraise_me()\n", "utf-8")
    for _ in range(2):
        with pytest.raises(InputError, match="NameError: name 'raise_me' is not defined"):
            plugins.load(["mine.py"])
    assert "module:leaky" not in TYPES and not zoo.taken("leaky") and "majority" not in TASKS
    assert [by for by, _ in plugins.REGISTERED if by == str(folder / "mine.py")] == []
    (folder / "mine.py").write_text(FILES["leaky.py"] + FILES["majority.py"], "utf-8")
    plugins.load(["mine.py"])
    assert zoo.taken("leaky") and "majority" in TASKS and zoo.taken("theirs")


def test_file_that_registers_nothing_is_executed_again(folder):
    """Its name is free for it, corrected, and for another file."""
    (folder / "other").mkdir()
    shutil.copy("leaky.py", "other/mine.py")
    (folder / "mine.py").write_text("x = 1\n", "utf-8")
    with pytest.raises(InputError, match="it registers nothing"):
        plugins.load(["mine.py"])
    assert plugins.FILE + "mine" not in sys.modules
    plugins.load(["other/mine.py"])
    assert zoo.taken("leaky")
    with pytest.raises(InputError, match="another plug-in is called mine"):
        plugins.load(["mine.py"])
    assert plugins.FILE + "mine" in sys.modules


def test_what_another_file_has_registered_before_it_fails_is_forgotten(folder, monkeypatch):
    """It is executed again; one that has ended without an error is not, and what it has registered stays."""
    monkeypatch.syspath_prepend(folder)
    (folder / "mine.py").write_text("import whole, half\n", "utf-8")
    (folder / "whole.py").write_text(FILES["fading.py"], "utf-8")
    (folder / "half.py").write_text(FILES["leaky.py"] + "\nraise_me()\n", "utf-8")
    with patch.dict(sys.modules):
        for _ in range(2):
            with pytest.raises(InputError, match="NameError: name 'raise_me' is not defined"):
                plugins.load(["mine.py"])
        assert not zoo.taken("leaky") and zoo.taken("fading-delta")
        (folder / "half.py").write_text(FILES["leaky.py"], "utf-8")
        plugins.load(["mine.py"])
    assert zoo.taken("leaky") and zoo.taken("fading-delta")


def test_interrupted_plug_in_is_loaded_again(folder):
    (folder / "mine.py").write_text("raise KeyboardInterrupt", "utf-8")
    with pytest.raises(KeyboardInterrupt):
        plugins.load(["mine.py"])
    shutil.copy("leaky.py", "mine.py")
    plugins.load(["mine.py"])
    assert "leaky" in zoo.names()


@pytest.mark.parametrize(
    ("name", "sentence"),
    {
        "nowhere.py": "does not exist; expected a Python file or a module",
        "no_such_module": "is no module that Python finds",
        "no.such.module": "cannot be loaded: ModuleNotFoundError: No module named 'no'",
        "json": "cannot be loaded: it registers nothing",
        "other/leaky.py": "another plug-in is called leaky.py too; expected different names",
    }.items(),
)
def test_missing_plug_in_is_one_sentence(folder, refusal, name, sentence):
    (folder / "other").mkdir()
    shutil.copy(folder / "leaky.py", folder / "other")
    said = refusal("verify", "--plugin", "leaky.py", "--plugin", name, "--mixers", "nothing")
    assert said.startswith(f"headrace: plug-in {name!r} (--plugin)") and sentence in said
