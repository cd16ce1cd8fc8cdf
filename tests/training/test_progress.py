"""What is said while a command runs."""

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from headrace.benchmarking import measure
from headrace.cli import console
from headrace.cli.train import print_parameters
from headrace.comparison.choose import choose
from headrace.comparison.run import LINES, board
from headrace.training import recipes


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_printed_as_lines_without_a_terminal(terminal):
    study = choose(steps=100)
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=140)
    with board(study, screen) as progress:
        arms = study.arms()
        for step in range(1, 100):
            progress.listen(arms[0], step, None)
        first = screen.file.getvalue()
        for arm in arms[1:]:
            progress.listen(arm, 99, None)
    lines = [line for line in screen.file.getvalue().splitlines() if line.endswith("steps of all arms")]
    if terminal:
        assert not lines
    else:
        assert f"of {100 * len(arms)} steps of all arms" in first and 2 < len(lines) <= LINES


COMMANDS = {
    "bench": (["--mixers", "gla", "--what", "memory", "--lengths", "8", "--batch-sizes", "1"], "1 of 1: memory, 8"),
    "eval": (["MODEL", "--suite", "wikitext", "--data", "FOLDER", "--max-length", "64"], ", wikitext"),
    "inspect": (["MODEL", "--text", "some text"], "layer 2 of"),
    "verify": (["--mixers", "gla,retnet"], "mixer 2 of 2"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_current_work_is_printed_without_a_terminal(command, saved_model, tmp_path, monkeypatch, run_command):
    arguments, line = COMMANDS[command]
    monkeypatch.setitem(measure.MEASUREMENTS, "memory", lambda point, plan: {n: {"bytes": 7} for n in plan.models})
    (tmp_path / "wiki.test.raw").write_text(" = Sea = \n \n The sea is a thing . \n")
    given = [{"MODEL": str(saved_model), "FOLDER": str(tmp_path)}.get(word, word) for word in arguments]
    output = [] if command == "verify" else ["--output", str(tmp_path / "out")]
    code, out, error = run_command(command, *given, *output)
    assert not code and line in out + error


@pytest.mark.parametrize("terminal", [True, False])
def test_names_in_brackets_are_no_markup(terminal, capsys):
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=140)
    with console.telling(screen) as tell:
        tell("reading [old]/model")
    assert "reading [old]/model" in screen.file.getvalue()
    console.terminal().print("The report is [old]/report.html", Table("[red]", title="[a]"))
    printed = capsys.readouterr().out
    assert "[old]/report.html" in printed and "[red]" in printed and "[a]" in printed


def test_a_table_without_a_terminal_has_whole_names(monkeypatch, capsys):
    monkeypatch.setattr(recipes, "names", lambda: ["laptop-1m"])
    mixer = "gated-deltanet(decay.dt_min=1e-5,decay.dt_max=1e-3)"
    print_parameters((mixer,))
    assert mixer in capsys.readouterr().out


def test_a_line_is_repeated_once_it_is_a_heartbeat_old(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console, "HEARTBEAT", 0.01)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    screen = Console(file=io.StringIO(), force_terminal=False, width=140)
    with console.telling(screen) as tell:
        tell("a point")
        time.sleep(0.1)
        assert screen.file.getvalue() == "a point\n"
        now[0], end = 120.0, time.monotonic() + 60
        while screen.file.getvalue().count("a point: at work for 2 min\n") < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
