"""What is said while a command runs."""

import io
import sys
import time

import pytest
from rich.console import Console

import tiny
from headrace.cli import app as cli
from headrace.cli import console
from headrace.data.tokenizer import byte_level
from headrace.studies.bench import measure
from headrace.studies.compare.choose import choose
from headrace.studies.compare.terminal import LINES, board


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_terminal_lines_say_how_far_it_is(terminal):
    study = choose(None, [], None, {"steps": 100})
    said = Console(file=io.StringIO(), force_terminal=terminal, width=140)
    with board(study, said) as progress:
        arms = study.arms()
        for step in range(1, 100):
            progress.listen(arms[0], step, None)
        first = said.file.getvalue()
        for arm in arms[1:]:
            progress.listen(arm, 99, None)
    lines = [line for line in said.file.getvalue().splitlines() if line.endswith("steps of all arms")]
    if terminal:
        assert not lines
    else:
        assert f"of {100 * len(arms)} steps of all arms" in first and 2 < len(lines) <= LINES


@pytest.fixture
def model(tmp_path):
    for part in (tiny.build("gla", vocab_size=257).float(), byte_level()):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


COMMANDS = {
    "bench": (["--mixers", "gla", "--what", "memory", "--lengths", "8", "--batch-sizes", "1"], "1 of 1: memory, 8"),
    "eval": (["MODEL", "--suite", "wikitext", "--data", "FOLDER", "--max-length", "64"], ", wikitext"),
    "inspect": (["MODEL", "--text", "some text"], "layer 2 of"),
    "verify": (["--mixers", "gla,retnet"], "mixer 2 of 2"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_terminal_a_line_says_what_is_at_work(command, model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval" if command == "eval" else "torch")
    arguments, line = COMMANDS[command]
    monkeypatch.setitem(measure.MEASUREMENTS, "memory", lambda point, plan: {n: {"bytes": 7} for n in plan.models})
    (tmp_path / "wiki.test.raw").write_text(" = Sea = \n \n The sea is a thing . \n")
    given = [{"MODEL": str(model), "FOLDER": str(tmp_path)}.get(word, word) for word in arguments]
    output = [] if command == "verify" else ["--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["headrace", command, *given, *output])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert not ended.value.code and line in said.out + said.err


def test_what_lasts_is_said_again(monkeypatch):
    monkeypatch.setattr(console, "HEARTBEAT", 0.01)
    said = Console(file=io.StringIO(), force_terminal=False, width=140)
    with console.telling(said) as tell:
        tell("a point")
        end = time.monotonic() + 60
        while said.file.getvalue().count("a point: at work for 0 min") < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
