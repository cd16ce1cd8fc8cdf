"""The laws of the laboratory hold for any seed, and what it writes can be read back."""

import itertools
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.cli import app as cli
from headrace.ops.reference import literal
from headrace.studies import theory as lab
from headrace.studies.theory import capacity
from headrace.studies.theory.base import entropy, exact, listed, shares, weights
from headrace.studies.theory.capacity import recognised
from headrace.studies.theory.crowding import halfway
from headrace.studies.theory.pathologies import rank_correlation
from headrace.studies.theory.remembering import Past, probed
from headrace.studies.theory.sharpness import gates_of
from headrace.studies.theory.storage import COUNTS, crossing
from headrace.utils.errors import InputError
from tiny import build

LONG = ("backbones", "past")
SEVERAL = [(name, seed) for name in lab.EXPERIMENTS if name not in LONG for seed in (0, 1, 2)]


@pytest.mark.parametrize(("name", "seed"), [*SEVERAL, *(pytest.param(x, 0, marks=pytest.mark.slow) for x in LONG)])
def test_every_law_holds(name, seed):
    finding = lab.experiment(name, seed)
    assert finding.rows
    assert [row for row in finding.rows if not row.holds] == []


def test_a_share_of_recognised_values_is_drawn_in_percent():
    shares = {
        key: torch.linspace(1, 0, len(capacity.SHARES)) for key in itertools.product(capacity.KINDS, capacity.WIDTHS)
    }
    found = capacity.Capacity(shares, shares)
    drawn = found.figure().axes[1].lines
    assert [(min(line.get_ydata()), max(line.get_ydata())) for line in drawn] == [(0, 100)] * len(shares)


def test_a_law_that_does_not_hold_is_seen():
    assert not lab.Row("", 2e-10, "≤", lab.EXACT).holds and not lab.Row("", 0.1, "≥", 0.5).holds
    assert not lab.Row("", float("nan"), "≤", 1).holds and not lab.Row("", float("nan"), "≥", 1).holds


def test_the_command_draws_and_writes_every_number(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headrace", "lab", "winner"])
    done = CliRunner().invoke(cli.app, ["lab", "winner", "--output", str(tmp_path), "--seed", "3"])
    assert done.exit_code == 0 and "holds" in done.stdout and "BROKEN" not in done.stdout
    record = json.loads((tmp_path / "winner.json").read_text("utf-8"))
    assert record["seed"] == 3 and record["sentence"] in done.stdout
    assert all(law["holds"] for law in record["laws"])
    assert {"torch", "processor", "headrace"} <= set(record["environment"])
    assert len(record["drawn"][0]["lines"][0]["points"]) > 10
    assert (tmp_path / "winner.png").read_bytes().startswith(b"\x89PNG")


def test_another_seed_is_another_finding_and_the_same_the_same():
    first, again, other = (lab.experiment("magnitude", seed) for seed in (0, 0, 1))
    assert first.rows == again.rows and first.sentence == again.sentence != other.sentence


def test_the_page_on_theory_has_every_experiment():
    page = (Path(__file__).parent.parent / "docs" / "theory.md").read_text("utf-8")
    assert re.findall(r"^`headrace lab (\w+)`:$", page, re.MULTILINE) == list(lab.EXPERIMENTS)


def test_the_list_and_unknown_names():
    listed = CliRunner().invoke(cli.app, ["lab"])
    assert listed.exit_code == 0 and all(name in listed.stdout for name in lab.EXPERIMENTS)
    with pytest.raises(InputError, match="NAME='winer' is unknown; expected all, or one of magnitude"):
        lab.chosen("winer")


def test_a_trained_model_is_probed_by_age_and_layer(tmp_path):
    build(["softmax-gla", "transformer", "mamba"], num_hidden_layers=3).save_pretrained(tmp_path)
    finding = lab.experiment("past", 1, tmp_path)
    assert [row.law for row in finding.rows] == ["layer 0: tokens read back", "layer 2: tokens read back"]
    assert all(row.holds for row in finding.rows) and finding.figure.axes[0].images[0].get_array().shape == (2, 32)
    assert f"{finding.rows[0].seen:.1f} (layer 0), {finding.rows[1].seen:.1f} (layer 2)" in finding.sentence


def test_a_checkpoint_without_a_fixed_memory_or_with_few_tokens_is_refused(tmp_path):
    build("transformer").save_pretrained(tmp_path / "attention")
    build("gla", vocab_size=9).save_pretrained(tmp_path / "few")
    for folder, said in (("attention", "has no layer with a memory of fixed size"), ("few", "has 9 tokens; expected")):
        with pytest.raises(InputError, match=said):
            lab.experiment("past", 0, tmp_path / folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["winer"], "NAME='winer' is unknown"),
        (
            ["winner", "--checkpoint", "here"],
            "--checkpoint 'here' with lab winner; expected --checkpoint only with lab past",
        ),
        (["all", "--checkpoint", "here"], "--checkpoint 'here' with lab all"),
        (["--checkpoint", "here"], "--checkpoint 'here' without an experiment"),
        (["past", "--checkpoint", "/none"], "checkpoint '/none' has no config.json"),
        (["winner", "--output", "/dev/null/lab"], "--output '/dev/null/lab' cannot be written"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, said):
    error = CliRunner().invoke(cli.app, ["lab", *arguments]).exception
    assert isinstance(error, InputError) and said in str(error) and "\n" not in str(error)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(["overwriting", "angle", "fading", "polarity"]))
def test_exact_laws_hold_for_any_keys_and_values(seed, name):
    exact = [row for row in lab.experiment(name, seed).rows if row.bound == lab.EXACT]
    assert exact
    assert all(row.holds for row in exact)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=9), st.floats(0, 50), st.floats(0, 50))
def test_entropy_of_the_gates_never_rises_with_the_scores(scores, a, b):
    """Theorem 4.2, ties included: there the entropy stays above 0."""
    s, (low, high) = torch.tensor(scores, dtype=torch.float64), sorted((a, b))
    assert entropy(gates_of(high * s)) <= entropy(gates_of(low * s)) + lab.EXACT


def test_weights_read_from_the_op_are_those_of_the_literal_loop():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 2, 4).double(), torch.nn.functional.normalize(torch.randn(1, 9, 2, 4).double(), dim=-1)
    log_decay, beta = -torch.rand(1, 9, 2).double(), torch.rand(1, 9, 2).double()
    names = torch.eye(9).double()[None, :, None].expand(1, 9, 2, 9)
    state = literal(k, k, names, log_decay=log_decay, beta=beta, rule="delta", scale=1.0)[1]
    expected = torch.einsum("bqhk,bhkt->bqht", q, state)
    torch.testing.assert_close(weights(q, k, log_decay=log_decay, beta=beta, rule="delta"), expected)


def test_the_probe_reads_back_what_is_there_and_nothing_else():
    torch.manual_seed(0)
    targets = torch.randn(300, 3, 4).double()
    memory = torch.cat([targets[:, 1] @ torch.randn(4, 4).double(), torch.randn(300, 5).double()], 1)
    known = probed(memory, targets)
    assert known[1] > 0.9 and known[[0, 2]].abs().max() < 0.1


def test_numbers_that_sentences_are_made_of():
    double = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    assert crossing((double(*COUNTS) / 100).sqrt()) == pytest.approx(100)  # noise √(n / d) is 1 at n = d
    assert halfway([1.0, 0.75, 0.25, 0, 0, 0, 0, 0]) == pytest.approx(4 * 2**0.5)  # of 2, 4, 8, …: halfway in log n
    assert halfway([0.4] * 8) == 2 and halfway([1.0] * 6 + [0.9, 0.6]) == pytest.approx(128 * 2 ** (4 / 3))
    assert entropy(double(0.5, 0.25, 0.25)) == pytest.approx(1.5 * math.log(2) / math.log(3))
    assert shares(double(1, 3)).tolist() == [0.25, 0.75]
    assert rank_correlation(double(1, 2, 9), double(-4, 0.5, 0.4)) == pytest.approx(0.5)  # Spearman's
    assert exact("", double(1.0, 3.5), double(1.0, -4.0)).seen == pytest.approx(7.5 / 4)
    assert listed({"a": 0.414, "b": 0.126}) == "0.41 (a), 0.13 (b)" and listed({}) == "none"
    read, stored = double([[1, 0.1], [3, 2]]), double([[5, 0], [0, 1]])
    assert recognised(read, stored).tolist() == [[1, 0]]


def test_half_lives_are_told():
    """0.9^6 > 1/2 > 0.9^7; 0.99^63 > 1/2; what was written before token 40 of 64 is at least 24 tokens old."""
    sentence = lab.experiment("fading").sentence
    assert "over 63 (α = 0.99), 7 tokens (α = 0.9)" in sentence and "24 tokens (reset at one token)" in sentence


def test_what_is_remembered_is_counted():
    past = Past({"a": torch.tensor([0.9, 0.2, 0.05])}, {"a": 2.0})
    assert (past.total["a"], past.reach["a"]) == (pytest.approx(1.15), 2)
    assert [row[1:] for row in lab.remembering.Probed.laws(past)] == [(pytest.approx(1.15), "≤", 2.0)]
