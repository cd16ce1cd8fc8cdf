"""What is said while a comparison runs."""

import io

import pytest
from rich.console import Console

from headrace.report.terminal import LINES, board
from headrace.train.choose import choose


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
