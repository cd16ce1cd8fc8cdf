"""The commands as functions of Python."""

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest

import headrace
from headrace.cli import compare, evaluate, train, use, verify
from headrace.cli.console import Interrupted, interruptible
from headrace.cli.options import converted
from headrace.utils.errors import InputError

FUNCTIONS = {
    headrace.compare: compare.CompareOptions, headrace.prepare: train.PrepareOptions,
    headrace.train: train.TrainOptions, headrace.evaluate: evaluate.EvaluateOptions,
    headrace.inspect: evaluate.InspectOptions, headrace.generate: use.GenerateOptions,
}  # fmt: skip
SMALL = {"steps": 2, "seeds": 1, "hidden_size": 16, "heads": 2, "batch_size": 4, "length": 8, "workers": 1}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_has_the_fields_of_its_options(function):
    record, empty = FUNCTIONS[function], inspect.Parameter.empty
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    assert defaults == {f.name: empty if f.default is MISSING else f.default for f in fields(record)}
    assert record.__dataclass_params__.frozen and function.__doc__


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("a/b", Annotated[Path | None, "help"], Path("a/b")), (None, Annotated[Path | None, "help"], None),
        (["gla", "retnet"], Annotated[str | None, "help"], "gla,retnet"), (3, Annotated[str | None, "help"], "3"),
        (["a.txt"], Annotated[list[str] | None, "help"], ["a.txt"]), (3, Annotated[int | None, "help"], 3),
        (True, Annotated[bool, "help"], True), ("a", Annotated[str, "help"], "a"), (5, Annotated[float, "help"], 5.0),
        ("a.txt", Annotated[list[str] | None, "help"], ["a.txt"]), (Path("a/b"), Annotated[str, "help"], "a/b"),
        (Path("a"), Annotated[list[str], "help"], ["a"]), (np.float32(0.5), Annotated[float | None, "help"], 0.5),
        (np.int64(3), Annotated[int, "help"], 3), (10**400, Annotated[float, "help"], 10**400),
    ],
)  # fmt: skip
def test_values_of_python_become_those_of_the_command_line(value, hint, expected):
    assert converted(value, hint) == expected and type(converted(value, hint)) is type(expected)


def test_compare_returns_its_results(tmp_path):
    results = headrace.compare(mixers=["retnet"], task="pair", output=str(tmp_path / "run"), **SMALL)
    (arm,) = results["arms"]
    assert (arm["mixer"], arm["seed"]) == ("retnet", 0) and (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (headrace.compare, {"mixers": "gal"}, "'gal' is unknown"),
        (headrace.compare, {"suite": "small", "steps": 3}, "--steps has no effect with --suite"),
        (headrace.train, {"recipe": "laptop-1m", "mixer": "gal"}, "'gal' is unknown"),
        (headrace.train, {"recipe": "laptop-1m", "efficiency": 0.3}, "--efficiency has no effect without --machine"),
        (headrace.generate, {"checkpoint": "HERE", "prompt_lookup": 0}, "--prompt-lookup=0; expected at least 1"),
        (headrace.generate, {"checkpoint": "HERE", "cuda_graph": True, "draft": "y"}, "--draft has no effect with"),
        (headrace.generate, {"checkpoint": "HERE", "threads": 0}, "--threads=0; expected at least 1"),
        (headrace.generate, {"checkpoint": None}, "--checkpoint=None; expected a path"),
        (headrace.generate, {"checkpoint": "HERE", "threads": True}, "--threads=True; expected an integer or None"),
        (headrace.generate, {"checkpoint": "HERE", "temperature": 10**400}, "--temperature has more than 64 bits"),
        (headrace.generate, {"checkpoint": "HERE", "save_state": "a\0b"}, r"--save-state=.*; expected a path or None"),
        (headrace.train, {"recipe": "1" * 400}, "111… is too long for the name of a file"),
        (headrace.prepare, {"output": "a", "sources": "1" * 400}, "111… is too long for the name of a file"),
        (headrace.train, {"recipe": "laptop-1m", "dry_run": "no"}, "--dry-run='no'; expected True or False"),
        (headrace.train, {"recipe": "1", "settings": [3]}, r"--settings=\[3\]; expected a list of text or None"),
        (headrace.evaluate, {"checkpoints": [], "suite": "needle"}, "eval has no checkpoint; expected at least one"),
        (verify.verify, {"backend": ""}, "backend='' is unknown; expected one of"),
        (use.convert, {"checkpoint": "a.gguf", "output": "b", "ignore": "c"}, "--ignore has no effect with a GGUF"),
        (headrace.load, {"path": None}, "path=None; expected a folder, or a name on the Hugging Face Hub"),
    ],
)
def test_options_are_checked_before_anything_runs(function, options, said, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=said):
        function(**{name: tmp_path if value == "HERE" else value for name, value in options.items()})


def test_generate_and_inspect_return_what_they_made(saved_model, tmp_path, capsys):
    made = headrace.generate(saved_model, "ab", max_new_tokens=3, temperature=0.0, threads=1)
    assert len(made["tokens"]) == 3 and made["text"] in capsys.readouterr().out
    page = headrace.inspect(saved_model, prompt="ab", output=tmp_path / "page.html")
    assert page == tmp_path / "page.html" and page.is_file()


def test_an_interrupted_function_raises_keyboard_interrupt(capsys):
    with pytest.raises(KeyboardInterrupt) as stop, interruptible("what is done is kept"):
        raise KeyboardInterrupt
    assert isinstance(stop.value, Interrupted) and stop.value.args == (130,)
    assert "interrupted: what is done is kept" in capsys.readouterr().err
