"""Numbers of benchmarks, computed here a second time by hand."""

import time
from unittest.mock import Mock

import pytest

from headrace.benchmarking import measure, report
from headrace.benchmarking.models import Shape, build, cache_bytes, ours
from headrace.benchmarking.plan import BenchPlan, Point, points

SHAPE = Shape(layers=3, hidden_size=64, heads=2, vocab_size=50)
PLAN = BenchPlan(("gla", "softmax-gla", "transformer"), SHAPE, rounds=3)
HELD = [
    {
        "point": vars(point), "environment": {"torch": "2"}, "clock": "cpu time",
        "models": {
            "gla": {"seconds": [4.0, 1.0, 2.0, 8.0, 2.0], "bytes": 400 * 2**20, "how": "64 tokens read"},
            "softmax-gla": {"seconds": [8.0, 1.5, 3.0, 12.0, 6.0], "bytes": 1200 * 2**20, "how": None},
            "transformer": {"left_out": "out of memory"},
        },
    }
    for point in points(["training", "memory", "prefill", "decoding"], [16], [4], [640])
]  # fmt: skip


def test_a_line_of_the_csv_is_of_the_median_round():
    """Of 1, 2, 2, 4, 8 s: quartiles (exclusive) 1.5 and 6, so that the spread is 4.5 / 2."""
    found = {line["what"]: line for line in report.rows(HELD, PLAN) if line["model"] == "gla"}
    assert [found[what]["tokens_per_second"] for what in ("training", "prefill", "decoding")] == ["32", "8", "0.5"]
    assert {(line["seconds"], line["spread"], line["rounds"]) for line in found.values()} == {("2", "2.250", 5)}
    about = {(x["dtype"], x["clock"], x["torch"], x["layers"], x["heads"]) for x in found.values()}
    assert about == {("float32", "cpu time", "2", 3, 2)}
    left_out = [x for x in report.rows(HELD, PLAN) if x["model"] == "transformer"]
    assert {(x["left_out"], x["rounds"], x["seconds"]) for x in left_out} == {("out of memory", 0, None)}


@pytest.mark.parametrize(
    ("what", "place", "out", "cost", "gla"),
    [
        # of the ratios 1.5, 1.5, 1.5, 2, 3: the median, and half of quartiles 1.5 and 2.5
        ("training", "16 × 4", "16 × 4", "+50.0% ± 50.0%", "32 ±112%"),
        ("prefill", "16", "16 × 1", "+50.0% ± 50.0%", "2,000.0 ms ±112%"),
        ("decoding", "640", "640 × 1", "+50.0% ± 50.0%", "2,000.0 ms ±112%"),
        ("memory", "16 × 4", "16 × 4", "+200.0% (one pair)", "400 MiB"),
    ],
)
def test_cells_of_the_page(what, place, out, cost, gla, tmp_path):
    assert report.overhead(HELD, "gla", what) == cost
    section = report.measured(what, report.rows(HELD, PLAN), PLAN, tmp_path)
    cells = {row[0]: row[1] for row in section.rows}
    assert cells["gla"] == gla and cells["transformer"] == "–" and section.header == ("model", place)
    how = ["Context by 64 tokens read: gla."] if what == "decoding" else []
    assert section.sentences == [f"transformer is left out at {out}: out of memory.", *how]


def test_there_is_no_picture_of_models_that_are_all_left_out(tmp_path):
    held = [one | {"models": {"transformer": {"left_out": "out of memory"}}} for one in HELD]
    section = report.measured("training", report.rows(held, PLAN), PLAN, tmp_path)
    assert not section.pictures and len(section.sentences) == 1


def test_points_are_measured_once_and_in_order(tmp_path, monkeypatch):
    measured, told = [], []
    monkeypatch.setattr(measure, "measure", lambda point, plan: measured.append(point) or {"gla": {"seconds": [1.0]}})
    wanted = points(["decoding", "training"], [1600, 16], [4], [640])
    measure.complete(PLAN, wanted[1:], tmp_path, told.append)
    held = measure.complete(PLAN, wanted, tmp_path, told.append)
    assert told[:3] == ["1 of 2: training, 16 × 4", "2 of 2: decoding, 640 × 1", "1 of 3: training, 1,600 × 4"]
    assert measured == [wanted[1], wanted[2], wanted[0]]
    assert [(one["point"]["what"], one["point"]["length"]) for one in held] == [
        ("training", 16), ("training", 1600), ("decoding", 640),
    ]  # fmt: skip


def test_only_attention_has_a_cache():
    assert cache_bytes("transformers-llama", SHAPE, 640, 4) == cache_bytes("transformer", SHAPE, 640, 4) == 983040
    assert cache_bytes("transformers-mamba2", SHAPE, 640, 4) == cache_bytes("gla", SHAPE, 640, 4) == 0
    assert cache_bytes("gpt", SHAPE, 640, 4) == 983040 == 3 * cache_bytes("gla+transformer", SHAPE, 640, 4)


def test_layers_have_the_mlp_of_their_model():
    """Mamba-2 alone has none; GPT's has no gate."""
    mlps = {name: ours(name, SHAPE).mlp for name in ("mamba2", "softmax-mamba2(heads.count=2)", "gla", "gpt")}
    assert mlps == {"mamba2": "none", "softmax-mamba2(heads.count=2)": "none", "gla": "swiglu", "gpt": "gelu-tanh"}
    assert ours("mamba2+transformer+gla", SHAPE).mlp == "swiglu"


def test_time_is_per_token_and_the_first_round_warms_up(monkeypatch):
    decoded = []
    with monkeypatch.context() as patched:
        patched.setattr(measure, "clock", lambda plan: lambda: 0.5 * len(decoded))
        assert measure.timed(lambda: decoded.append(1), PLAN, measure.TOKENS) == 0.5
    assert len(decoded) == measure.TOKENS
    clock = iter(range(100))
    found = measure.taking_turns(["a", "b"], lambda name: next(clock), PLAN)
    assert found == {"a": {"seconds": [2, 4, 6]}, "b": {"seconds": [3, 5, 7]}}


def test_an_error_of_a_model_leaves_nothing_frozen(monkeypatch):
    monkeypatch.setattr(measure, "gc", calls := Mock())
    with pytest.raises(ZeroDivisionError):
        measure.taking_turns(["a"], lambda name: 1 / 0, PLAN)
    assert [name for name, *_ in calls.method_calls] == ["freeze", "unfreeze"]


@pytest.mark.parametrize(("what", "batch"), [("training", 3), ("prefill", 1)])
def test_a_timed_model_reads_the_tokens_of_its_point(what, batch, monkeypatch):
    seen = []

    def listened(name, plan):
        listener = build(name, plan.shape)
        listener.register_forward_pre_hook(
            lambda _, args, given: seen.append(given["input_ids"].shape), with_kwargs=True
        )
        return listener

    monkeypatch.setattr(measure, "built", listened)
    monkeypatch.setattr(measure, "timed", lambda call, plan: seen.append("timed") or call() or 2.0)
    found = measure.measure(Point(what, 100, batch), BenchPlan(("gla",), SHAPE, rounds=1))
    assert seen == 2 * [(1, 64), "timed", (batch, 100)] and found == {"gla": {"seconds": [2.0]}}


@pytest.mark.parametrize(("threads", "expected"), [(1, 3.0), (2, 5.0)])
def test_one_thread_is_timed_by_its_own_clock(threads, expected, monkeypatch):
    cpu, wall = iter((10.0, 13.0)), iter((20.0, 25.0))
    monkeypatch.setattr(time, "process_time", lambda: next(cpu))
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    assert measure.timed(lambda: None, BenchPlan(("gla",), SHAPE, threads=threads)) == expected


def test_memory_is_in_bytes(monkeypatch, tmp_path):
    (tmp_path / "status").write_text("VmHWM:\t 300 kB\nVmRSS:\t 200 kB\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  7 kB\n")
    monkeypatch.setattr(measure, "Path", lambda path: tmp_path / path.rpartition("/")[2])
    assert (measure.resident("VmHWM"), measure.resident("VmRSS"), measure.free(PLAN)) == (307200, 204800, 7168)


def test_peers_are_as_wide_and_deep_as_ours():
    """Heads of 64 channels, as their published models have; an MLP of 8/3 of the width, 171 → 176."""
    llama, mamba, qwen = (build(f"transformers-{name}", SHAPE).config for name in ("llama", "mamba2", "qwen3-next"))
    assert {config.vocab_size for config in (llama, mamba, qwen)} == {50}
    assert (llama.hidden_size, llama.num_hidden_layers) == (64, 3)
    assert (llama.num_attention_heads, llama.intermediate_size) == (1, 176)
    assert (mamba.hidden_size, mamba.num_hidden_layers) == (64, 3)
    assert (mamba.num_heads, mamba.head_dim, mamba.n_groups) == (2, 64, 1)
    assert (qwen.linear_key_head_dim, qwen.linear_value_head_dim, qwen.linear_num_key_heads) == (24, 48, 2)
    assert qwen.intermediate_size == 176 and qwen.layer_types == ["linear_attention"] * 3
    assert vars(Shape()) == {"layers": 24, "hidden_size": 1024, "heads": 4, "vocab_size": 32000}
