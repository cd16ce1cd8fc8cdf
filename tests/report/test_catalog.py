"""The unifying table: it is derived from the specs, and complete."""

import json
from dataclasses import replace

import pytest

from headrace import zoo
from headrace.extra.specs.matrix import MatrixSpec
from headrace.extra.specs.scan import ScanSpec
from headrace.history.specs.softmax_rnn import SoftmaxRNNSpec
from headrace.report import catalog
from headrace.spec import AttentionSpec, Decay, Heads, MixerSpec, Read

COLUMNS = {column for columns in catalog.VIEWS.values() for column in columns}


@pytest.mark.parametrize("name", zoo.names())
def test_every_mixer_has_a_complete_row(name):
    row = catalog.describe(name)
    assert row.keys() > COLUMNS and all(row[column] not in ("", None) for column in COLUMNS)
    assert row["paper"].startswith("https://") and zoo.get(row["spec"]) == zoo.get(name)
    softmax = name.removeprefix("softmax-") in zoo.LINEAR and name not in zoo.LINEAR
    assert row["competes"] == (softmax or name in zoo.PUBLISHED)
    json.dumps(row)


@pytest.mark.parametrize("name", zoo.LINEAR)
def test_costs_and_updates_follow_from_the_spec(name):
    row, spec = catalog.describe(name), zoo.get(name)
    assert isinstance(spec, MixerSpec) and row["decoding"] == spec.flops_per_token(catalog.WIDTH, catalog.HEADS)
    assert 4 * row["numbers"] == spec.state_bytes(catalog.WIDTH, catalog.HEADS)
    assert row["overwrites"] == ("kᵀk" in row["A_t"]) == (row["objective"] == "½‖v − kS‖²")
    assert row["forgets"] == any(letter in row["A_t"] for letter in "αγ")
    softmax = catalog.describe(f"softmax-{name}")
    assert "w" in softmax["b_t"] and softmax["A_t"] == row["A_t"] and softmax["paper"] == row["paper"]


NUMBERS = {  # in a state after one token, 64 wide with 4 heads
    "gla": 4 * 8 * 16, "rwkv7": 4 * 16 * 16 + 64, "mamba": 128 * 16 + 3 * 128, "rwkv4": 3 * 64 + 64,
    "transformer": 2 * 64, "gqa": 2 * 2 * 16, "softmax-rnn-norm": 2 * 64,
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_bytes_of_a_state_are_its_numbers_times_their_size(name):
    spec = zoo.get(name)
    assert (spec.state_bytes(64, 4), spec.state_bytes(64, 4, itemsize=2)) == (4 * NUMBERS[name], 2 * NUMBERS[name])


ONE_WAY = replace(zoo.get("bahdanau"), bidirectional=False)
OF_MODELS = [  # after 10 tokens, 64 wide with 4 heads
    ("rnn", 2, 2 * 2 * 64),  # the two vectors of an LSTM
    ("bahdanau", 2, 2 * 64 + 10 * 2 * 64),  # and annotations of the source
    (ONE_WAY, 2, 2 * 64 + 10 * 64),
    ("t5", 2, 2 * (2 * 64 * 10 + 2 * 64 * 10)),  # keys and values of source and target
    ("jamba", 8, 7 * NUMBERS["mamba"] + 2 * 2 * 16 * 10),  # with keys and values of 2 heads
    ("zamba", 6, 6 * NUMBERS["mamba"] + 2 * 128 * 10),  # its shared attention is twice as wide
    ("bert", 2, 0),
]


@pytest.mark.parametrize(("model", "layers", "numbers"), OF_MODELS)
def test_bytes_of_a_model_s_states(model, layers, numbers):
    spec = zoo.get(model) if isinstance(model, str) else model
    assert spec.state_bytes(64, 4, 10, layers) == 4 * numbers
    assert spec.state_bytes(64, 4, 10, layers, itemsize=2) == 2 * numbers


ADDED = {
    "LINEAR": MixerSpec(decay=Decay("softplus"), read=Read("rms", "silu")),
    "SCANS": ScanSpec("s4d", state_size=8),
    "MATRICES": MatrixSpec("rwkv7"),
    "ATTENTION": AttentionSpec(kv_heads=4),
    "OTHERS": SoftmaxRNNSpec(denominator="rms"),
}


@pytest.mark.parametrize("table", ADDED)
def test_a_mixer_added_at_run_time_has_a_row(monkeypatch, table):
    monkeypatch.setitem(getattr(zoo, table), "mine", ADDED[table])
    for name in ("mine", "softmax-mine") if table == "LINEAR" else ("mine",):
        row = catalog.describe(name)
        assert name in zoo.names() and row["paper"] == "–" and all(row[column] not in ("", None) for column in COLUMNS)
        assert zoo.get(row["spec"]) == zoo.get(name)


def test_a_name_of_the_zoo_may_begin_with_softmax(monkeypatch):
    monkeypatch.setitem(zoo.LINEAR, "softmax-mine", ADDED["LINEAR"])
    assert zoo.get("softmax-mine") == ADDED["LINEAR"]
    assert zoo.get("softmax-softmax-mine") == zoo.compete(ADDED["LINEAR"])


def test_a_mixer_that_does_not_fit_the_table_width_has_its_reason_in_the_row(monkeypatch):
    monkeypatch.setitem(zoo.LINEAR, "mine", MixerSpec(Heads(count=3)))
    row = catalog.describe("mine")
    assert row["state"].startswith("num_heads=3 does not divide") and row["numbers"] is row["decoding"] is None


def test_an_expression_has_the_paper_of_what_it_changes():
    assert catalog.describe("softmax-gla(heads.expand_k=1)")["paper"] == catalog.describe("gla")["paper"]
