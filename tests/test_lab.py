"""The laws of the laboratory hold for any seed, and what it writes can be read back."""

import json
import sys

import pytest
from typer.testing import CliRunner

from headrace import cli, lab
from headrace.errors import InputError


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", lab.EXPERIMENTS)
def test_every_law_holds(name, seed):
    finding = lab.experiment(name, seed)
    assert finding.rows
    assert [row for row in finding.rows if not row.holds] == []


def test_a_law_that_does_not_hold_is_seen():
    assert not lab.Row("", 2e-10, "≤", lab.EXACT).holds and not lab.Row("", 0.1, "≥", 0.5).holds
    assert not lab.Row("", float("nan"), "≤", 1).holds and not lab.Row("", float("nan"), "≥", 1).holds


def test_the_command_draws_and_writes_every_number(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headrace", "lab", "winner"])
    done = CliRunner().invoke(cli.app, ["lab", "winner", "--output", str(tmp_path), "--seed", "3"])
    assert done.exit_code == 0 and "holds" in done.stdout and "BROKEN" not in done.stdout
    record = json.loads((tmp_path / "winner.json").read_text())
    assert record["seed"] == 3 and record["sentence"] in done.stdout
    assert all(law["holds"] for law in record["laws"])
    assert {"torch", "processor", "headrace"} <= set(record["environment"])
    assert len(record["drawn"][0]["lines"][0]["points"]) > 10
    assert (tmp_path / "winner.png").read_bytes().startswith(b"\x89PNG")


def test_another_seed_is_another_finding_and_the_same_the_same():
    first, again, other = (lab.experiment("magnitude", seed) for seed in (0, 0, 1))
    assert first.rows == again.rows and first.sentence == again.sentence != other.sentence


def test_the_list_and_unknown_names():
    listed = CliRunner().invoke(cli.app, ["lab"])
    assert listed.exit_code == 0 and all(name in listed.stdout for name in lab.EXPERIMENTS)
    with pytest.raises(InputError, match="NAME='winer' is unknown; expected all, or one of magnitude"):
        lab.chosen("winer")
