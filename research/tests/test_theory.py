"""The theoretical properties hold for any seed, and the written results can be read back."""

import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.files.processes import locked
from headrace.ops.reference import literal
from headrace.utils.errors import InputError
from research import theory
from research.theory import capacity
from research.theory.__main__ import app
from research.theory.additive_memory import COUNTS, pairs_at_unit_noise
from research.theory.base import attention_weights, check_equal, entropy, format_values, normalized
from research.theory.capacity import is_nearest
from research.theory.head_competition import gates_from_scores
from research.theory.mixer_capacity import count_at_half
from research.theory.pathologies import rank_correlation
from research.theory.state_probe import Probe, StateProbe, probe
from tiny import build

LONG = ("mixer-capacity", "state-probe")
SEVERAL = [(name, seed) for name in theory.EXPERIMENTS if name not in LONG for seed in (0, 1, 2)]


@pytest.mark.parametrize(("name", "seed"), [*SEVERAL, *(pytest.param(x, 0, marks=pytest.mark.slow) for x in LONG)])
def test_every_law_holds(name, seed):
    result = theory.run(name, seed)
    assert result.checks
    assert [row for row in result.checks if not row.holds] == []


def test_a_violated_law_is_reported():
    assert not theory.Check("", 2e-10, "≤", theory.TOLERANCE).holds and not theory.Check("", 0.1, "≥", 0.5).holds
    assert not theory.Check("", float("nan"), "≤", 1).holds and not theory.Check("", float("nan"), "≥", 1).holds


def test_the_command_draws_and_writes_every_number(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["theory", "winner-take-all"])
    done = CliRunner().invoke(app, ["winner-take-all", "--output", str(tmp_path), "--seed", "3"])
    assert done.exit_code == 0 and "holds" in done.stdout and "FAILS" not in done.stdout
    record = json.loads((tmp_path / "winner-take-all.json").read_text("utf-8"))
    assert record["command"] == ["python", "-m", "research.theory", "winner-take-all"]
    assert record["seed"] == 3 and record["summary"] in done.stdout
    assert record["checks"] and all(check["holds"] for check in record["checks"])
    assert {"torch", "processor", "headrace"} <= set(record["environment"])
    assert len(record["plotted"][0]["lines"][0]["points"]) > 10
    assert (tmp_path / "winner-take-all.png").read_bytes().startswith(b"\x89PNG")


def test_results_are_determined_by_the_seed():
    first, again, other = (theory.run("magnitude", seed) for seed in (0, 0, 1))
    assert first.checks == again.checks and first.summary == again.summary != other.summary


def test_every_experiment_is_drawn_on_a_page_below_its_command():
    docs = Path(__file__).parents[1] / "docs"
    pages = "".join(page.read_text("utf-8") for page in sorted(docs.glob("*.md")) if page.name != "log.md")
    assert sorted(re.findall(r"^`python -m research\.theory ([\w-]+)`:$", pages, re.MULTILINE)) == sorted(
        theory.EXPERIMENTS
    )
    assert all(f'law("{name}")' in pages or f"research.theory {name}`:\n\n>" in pages for name in theory.EXPERIMENTS)


def test_experiments_are_listed_and_unknown_names_refused():
    listed = CliRunner().invoke(app, [])
    assert listed.exit_code == 0 and all(name in listed.stdout for name in theory.EXPERIMENTS)
    with pytest.raises(InputError, match="NAME='winer' is unknown; expected all, or one of magnitude"):
        theory.select("winer")


def test_a_trained_model_is_probed_by_age_and_layer(tmp_path):
    build(["softmax-gla", "transformer", "mamba"], num_hidden_layers=3).save_pretrained(tmp_path)
    result = theory.run("state-probe", 1, tmp_path)
    assert [row.claim for row in result.checks] == ["layer 0: recovered tokens", "layer 2: recovered tokens"]
    assert all(row.holds for row in result.checks) and result.figure.axes[0].images[0].get_array().shape == (2, 32)
    assert f"{result.checks[0].measured:.1f} (layer 0), {result.checks[1].measured:.1f} (layer 2)" in result.summary


def test_a_checkpoint_without_a_fixed_memory_or_with_few_tokens_is_refused(tmp_path):
    build("transformer").save_pretrained(tmp_path / "attention")
    build("gla", vocab_size=9).save_pretrained(tmp_path / "few")
    for folder, said in (("attention", "has no layer with a memory of fixed size"), ("few", "has 9 tokens; expected")):
        with pytest.raises(InputError, match=said):
            theory.run("state-probe", 0, tmp_path / folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["winer"], "NAME='winer' is unknown"),
        (
            ["polarity", "--checkpoint", "here"],
            "--checkpoint 'here' with NAME='polarity'; expected it only with state-probe",
        ),
        (["all", "--checkpoint", "here"], "--checkpoint 'here' with NAME='all'"),
        (["--checkpoint", "here"], "--checkpoint 'here' without an experiment"),
        (["state-probe", "--checkpoint", "/none"], "checkpoint '/none' has no config.json"),
        (["polarity", "--output", "/dev/null/theory"], "--output '/dev/null/theory' cannot be written"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, said):
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, InputError) and said in str(error) and "\n" not in str(error)


def test_the_command_exits_with_2_and_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["theory", "winer"])
    monkeypatch.delitem(sys.modules, "research.theory.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("research.theory", run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("research.theory: NAME='winer' is unknown")
    assert said.count("\n") == 1


def test_a_folder_in_use_is_refused(tmp_path):
    with locked(tmp_path):
        error = CliRunner().invoke(app, ["crosstalk", "--output", str(tmp_path)]).exception
    assert isinstance(error, InputError) and str(tmp_path) in str(error)


def test_failed_check_exits_with_1(tmp_path, monkeypatch):
    failing = theory.Result([theory.Check("x", 1.0, "≤", 0.5)], "Summary.", theory.run("crosstalk").figure)
    monkeypatch.setattr("research.theory.__main__.run", lambda *_: failing)
    done = CliRunner().invoke(app, ["crosstalk", "--output", str(tmp_path)])
    assert done.exit_code == 1 and "FAILS" in done.stdout


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(["overwriting", "key-angle", "forgetting", "polarity"]))
def test_exact_laws_hold_for_any_keys_and_values(seed, name):
    exact = [row for row in theory.run(name, seed).checks if row.bound == theory.TOLERANCE]
    assert exact
    assert all(row.holds for row in exact)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=9), st.floats(0, 50), st.floats(0, 50))
def test_entropy_of_the_gates_never_rises_with_the_scores(scores, a, b):
    """Theorem 4.2, ties included: there the entropy stays above 0."""
    s, (low, high) = torch.tensor(scores, dtype=torch.float64), sorted((a, b))
    assert entropy(gates_from_scores(high * s)) <= entropy(gates_from_scores(low * s)) + theory.TOLERANCE


def test_weights_read_from_the_op_are_those_of_the_literal_loop():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 2, 4).double(), torch.nn.functional.normalize(torch.randn(1, 9, 2, 4).double(), dim=-1)
    log_decay, beta = -torch.rand(1, 9, 2).double(), torch.rand(1, 9, 2).double()
    names = torch.eye(9).double()[None, :, None].expand(1, 9, 2, 9)
    state = literal(k, k, names, log_decay=log_decay, beta=beta, rule="delta", scale=1.0)[1]
    expected = torch.einsum("bqhk,bhkt->bqht", q, state)
    torch.testing.assert_close(attention_weights(q, k, log_decay=log_decay, beta=beta, rule="delta"), expected)


def test_the_probe_recovers_stored_tokens_only():
    torch.manual_seed(0)
    targets = torch.randn(300, 3, 4).double()
    memory = torch.cat([targets[:, 1] @ torch.randn(4, 4).double(), torch.randn(300, 5).double()], 1)
    known = probe(memory, targets)
    assert known[1] > 0.9 and known[[0, 2]].abs().max() < 0.1


def test_numbers_in_summaries_by_hand():
    double = lambda *x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    assert pairs_at_unit_noise((double(*COUNTS) / 100).sqrt()) == pytest.approx(100)  # noise √(n / d) is 1 at n = d
    assert count_at_half([1.0, 0.75, 0.25, 0, 0, 0, 0, 0]) == pytest.approx(4 * 2**0.5)  # between 4 and 8
    assert count_at_half([0.4] * 8) == 2 and count_at_half([1.0] * 6 + [0.9, 0.6]) == pytest.approx(128 * 2 ** (4 / 3))
    assert entropy(double(0.5, 0.25, 0.25)) == pytest.approx(1.5 * math.log(2) / math.log(3))
    assert normalized(double(1, 3)).tolist() == [0.25, 0.75]
    assert rank_correlation(double(1, 2, 9), double(-4, 0.5, 0.4)) == pytest.approx(0.5)  # Spearman's
    assert check_equal("", double(1.0, 3.5), double(1.0, -4.0)).measured == pytest.approx(7.5 / 4)
    assert format_values({"a": 0.414, "b": 0.126}) == "0.41 (a), 0.13 (b)" and format_values({}) == "none"
    read, stored = double([[1, 0.1], [3, 2]]), double([[5, 0], [0, 1]])
    assert is_nearest(read, stored).tolist() == [[1, 0]]


def test_half_lives_are_stated():
    """0.9^6 > 1/2 > 0.9^7; 0.99^63 > 1/2; what was written before token 40 of 64 is at least 24 tokens old."""
    sentence = theory.run("forgetting").summary
    assert "over 63 (α = 0.99), 7 tokens (α = 0.9)" in sentence and "24 tokens (reset at one token)" in sentence


def test_recovered_tokens_are_counted():
    past = StateProbe({"a": torch.tensor([0.9, 0.2, 0.05])}, {"a": 2.0})
    assert (past.total["a"], past.ages["a"]) == (pytest.approx(1.15), 2)
    assert [row[1:] for row in Probe.checks(past)] == [(pytest.approx(1.15), "≤", 2.0)]


def test_retrieval_accuracy_is_drawn_in_percent():
    falling = {
        (name, d): torch.linspace(1, 0, len(capacity.LOADS)) for name in capacity.VARIANTS for d in capacity.WIDTHS
    }
    lines = capacity.Capacity(falling, falling).figure().axes[1].lines
    assert [(min(line.get_ydata()), max(line.get_ydata())) for line in lines] == [(0, 100)] * len(falling)
