"""What competition costs is measured in pairs, resumed where it was, and told with how it was reached."""

import csv
import inspect
import itertools
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch

import tiny
from groups import wait_for
from headrace import InputError
from headrace.benchmarking import measure, report
from headrace.benchmarking.decoding import CACHED, READ_ALL, RECURRENT, Decoder
from headrace.benchmarking.generation import NEW, ROUNDS, speeds
from headrace.benchmarking.models import Shape, build, cache_bytes, named
from headrace.benchmarking.plan import BenchPlan, Point
from headrace.cli import evaluate as cli_eval
from headrace.files.environment import commit
from released import release

PATIENCE = 600  # seconds, for a machine that does much else
SHAPE = Shape(layers=1, hidden_size=64, heads=2, vocab_size=50)


def test_each_linear_mixer_is_followed_by_its_softmax_version():
    assert named("gla,transformer,transformers-llama") == ("gla", "softmax-gla", "transformer", "transformers-llama")
    assert named("gla,softmax-gla") == ("gla", "softmax-gla")
    with pytest.raises(InputError, match="transformers-mamba"):
        named("transformers-mamba")


@pytest.mark.parametrize("name, how", [
    ("softmax-retnet", RECURRENT), ("mamba", RECURRENT), ("sliding-window", RECURRENT), ("transformer", CACHED),
    ("lolcats(window=7)", RECURRENT), ("transformers-llama", CACHED), ("transformers-mamba2", RECURRENT),
    ("transformers-qwen3-next", RECURRENT),
])  # fmt: skip
@torch.inference_mode()
def test_state_has_its_size_at_every_position(name, how):
    decoders = {position: Decoder(build(name, SHAPE)) for position in (100, 200)}
    for position, decoder in decoders.items():
        decoder.reach(position)
        assert decoder.how == how
        if how == CACHED:
            assert decoder.state_bytes() == cache_bytes(name, SHAPE, position, itemsize=4)
        decoder.token()
        decoder.token()
    sizes = {position: decoder.state_bytes() for position, decoder in decoders.items()}
    assert (sizes[100] == sizes[200]) == (how != CACHED)


@torch.inference_mode()
def test_a_model_with_one_state_that_cannot_be_moved_reads_the_whole_context():
    decoder = Decoder(tiny.build("channel mixing").float())
    decoder.reach(100)
    assert decoder.how == READ_ALL and decoder.cache.columns == 100


@torch.inference_mode()
def test_a_recurrence_that_is_moved_knows_its_position():
    """Rotary positions: the same 64 tokens, then one that stands at 1,000."""
    moved, read = (Decoder(build("retnet", SHAPE)) for _ in range(2))
    torch.manual_seed(1)
    moved.reach(1000)
    torch.manual_seed(1)
    read.read(64)
    assert torch.equal(moved.cache.states[0].memory, read.cache.states[0].memory)
    assert moved.cache.states[0].tokens.item() == moved.cache.columns == 1000


BYTES = {n: {"a": n, "b": n} for n in (100, 300)}


def two(name, **sizes):
    return {each: tiny.build(name, **sizes).float() for each in ("a", "b")}


def noted(name, step, turns):
    def noting(model, tokens, cache):
        turns.append((name, cache.columns))
        return step(model, tokens, cache)

    return noting


def test_generation_goes_on_after_each_context_in_turn(monkeypatch):
    """By what `generate` calls, though the models would stop at once."""
    models, turns = two("hybrid"), []
    for name, model in models.items():
        model.generation_config.eos_token_id = list(range(29))
        monkeypatch.setattr(model.engine, "step", noted(name, model.engine.step, turns))
    found = speeds(models, BYTES)
    starts = [n + round * (NEW + 1) for n in BYTES for round in range(ROUNDS + 1)]
    assert turns == [(name, start + i) for start in starts for name in models for i in range(1, NEW + 1)]
    assert found["left_out"] == {} and found["max_position_embeddings"] == 2048
    assert all(speed > 0 for n in BYTES for speed in found["tokens_per_second"][n].values())
    assert found["engine"] == {name: model.engine.about(model) for name, model in models.items()}


def test_the_speed_is_the_median_of_tokens_and_rounds(monkeypatch):
    """Not of the first round, nor of the first token of a turn; each turn looks at the clock NEW + 2 times."""
    rounds = [x for _ in range(ROUNDS) for of in (2.0, 4.0) for x in (0, 9, *[of] * NEW)]
    now = itertools.accumulate([9.0] * 2 * (NEW + 2) + rounds)
    monkeypatch.setattr("headrace.benchmarking.generation.clock", lambda plan: lambda: next(now))
    assert speeds(two("gla"), {100: BYTES[100]})["tokens_per_second"] == {100: {"a": 0.5, "b": 0.25}}


@pytest.mark.parametrize(
    ("name", "memory", "sentence"),
    [
        ("gpt", 2**30, "the model has positions for 128 tokens"),
        ("gla", 4 * 299, "its cache needs 0.0 GiB, more than 1/4"),
        ("gla", None, "the system does not tell its free memory"),
    ],
)
def test_a_context_that_cannot_be_is_left_out(name, memory, sentence, monkeypatch):
    monkeypatch.setattr("headrace.benchmarking.generation.free", lambda plan: memory)
    found = speeds(two(name, max_position_embeddings=128), BYTES)
    assert list(found["tokens_per_second"]) == ([100] if memory else []) and found["left_out"][300].startswith(sentence)


@pytest.mark.parametrize("what", ["memory", "decoding"])
@pytest.mark.parametrize(("device", "proc"), [("xpu", True), ("cpu", False)])
def test_unknown_memory_is_refused(what, device, proc, monkeypatch):
    """The memory of the CPU is not that of another device."""
    if not proc:
        monkeypatch.setattr(Path, "read_text", lambda path: os.stat("/none"))
    with pytest.raises(InputError, match=f"--what={what} needs a CPU with /proc or CUDA, not '{device}'"):
        measure.measure(Point(what, 16), BenchPlan(("gla",), SHAPE, device))


def test_what_pytorch_keeps_of_earlier_points_is_free_memory(monkeypatch):
    kept = [2]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 - sum(kept), 10))
    assert measure.free(BenchPlan(("gla",), SHAPE, "cuda:1")) == 9


def test_the_clock_waits_for_the_device_of_the_plan(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    measure.timed(lambda: waited.append("call"), BenchPlan(("gla",), SHAPE, "cuda:1"))
    assert waited == ["cuda:1", "call", "cuda:1"]


def test_a_model_that_cannot_run_here_is_left_out(monkeypatch):
    trained = lambda point, plan: {n: {"seconds": [1.0]} for n in plan.models}  # noqa: E731
    monkeypatch.setitem(measure.MEASUREMENTS, "training", trained)
    monkeypatch.setattr("headrace.benchmarking.models.find_spec", lambda package: object())  # FLA is installed
    names = ("transformers-qwen3-next", "transformers-llama")
    found = measure.measure(Point("training", 16), BenchPlan(names, SHAPE))
    assert list(found) == list(names) and found["transformers-llama"] == {"seconds": [1.0]}
    assert "FLA's kernels, which need a GPU" in found["transformers-qwen3-next"]["left_out"]


@pytest.mark.parametrize(("what", "fits"), [("training", 2048), ("prefill", 2048), ("decoding", 2048 - 2 * 8)])
def test_a_model_without_positions_for_a_length_is_left_out(what, fits, monkeypatch):
    """A decoder of one round takes two turns of 8 tokens behind its context."""
    monkeypatch.setitem(measure.MEASUREMENTS, what, lambda point, plan: {n: {"seconds": [1.0]} for n in plan.models})
    plan, why = BenchPlan(("gla", "gpt"), SHAPE, rounds=1), "the model has positions for 2,048 tokens"
    found = [measure.measure(Point(what, length), plan) for length in (fits, fits + 1)]
    assert [own["gpt"] for own in found] == [{"seconds": [1.0]}, {"left_out": why}] and "seconds" in found[1]["gla"]


@pytest.mark.slow
def test_a_peak_is_at_least_weights_gradients_and_moments():
    shape = Shape(layers=1, hidden_size=64, heads=2, vocab_size=100_000)
    weights = sum(x.nbytes for x in build("gla", shape).parameters())
    found = measure.memory(Point("memory", 16), BenchPlan(("gla",), shape))
    logits = 4 * 16 * shape.vocab_size
    # The weights, two moments, and the gradient of the embedding, which the head has too until the two are added.
    assert 4 * weights < found["gla"]["bytes"] < 5 * weights + 6 * logits


@pytest.mark.slow
def test_interrupted_bench_continues(tmp_path, monkeypatch):
    monkeypatch.setitem(measure.MEASUREMENTS, "memory", lambda point, plan: {n: {"bytes": 7} for n in plan.models})
    arguments = {
        "mixers": "gla,transformers-llama", "what": "memory,training,prefill,decoding", "layers": 1, "hidden_size": 32,
        "heads": 2, "batch_sizes": "1", "contexts": "80", "rounds": 2, "threads": 1, "device": "cpu", "dtype": None,
        "output": tmp_path / "bench",
    }  # fmt: skip
    cli_eval.bench(lengths="16", **arguments)
    first = (tmp_path / "bench" / "points" / "training-16x1.json").read_text("utf-8")
    cli_eval.bench(lengths="16,24", **arguments)
    assert (tmp_path / "bench" / "points" / "training-16x1.json").read_text("utf-8") == first
    rows = list(csv.DictReader((tmp_path / "bench" / "bench.csv").read_text("utf-8").splitlines()))
    assert [row["what"] for row in rows[::3]] == [*2 * ["memory"], *2 * ["training"], *2 * ["prefill"], "decoding"]
    assert {row["model"] for row in rows} == {"gla", "softmax-gla", "transformers-llama"}
    assert all(row["torch"] and row["commit"] == (commit() or "") and row["threads"] == "1" for row in rows)
    page = (tmp_path / "bench" / "report.html").read_text("utf-8")
    assert "Overhead of competition" in page and page.count("<svg") == 4


def endless(begun, *_):
    begun.touch()
    time.sleep(PATIENCE)


@pytest.fixture
def begun(tmp_path):
    """A file that exists once something is measured."""
    return tmp_path / "begun"


@pytest.fixture
def measures_without_end(monkeypatch, begun):
    monkeypatch.setattr(measure, "context", lambda devices: get_context("fork"))
    monkeypatch.setattr(measure, "peak", partial(endless, begun))
    return partial(measure.memory, Point("memory", 16), BenchPlan(("gla",), SHAPE))


def test_the_process_of_a_killed_bench_ends_too(measures_without_end):
    """The one whose memory is measured."""
    process = get_context("fork").Process(target=measures_without_end)
    process.start()
    while not (family := psutil.Process(process.pid).children()):
        assert process.is_alive()
        time.sleep(0.02)
    process.kill()
    process.join()
    assert not psutil.wait_procs(family, timeout=PATIENCE / 2)[1]


def test_an_interruption_does_not_wait_for_what_is_measured(measures_without_end, begun):
    def interrupt():
        wait_for(begun.exists)
        time.sleep(0.5)  # Python drops an interruption of what it runs after a fork
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    times, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            measures_without_end()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - times[0] < PATIENCE / 2


def test_the_cost_of_competition_is_of_pairs():
    assert report.overheads([], BenchPlan(("gla", "softmax-gla"), SHAPE)).rows == [("gla" + report.FORMS["softmax"],)]
    plan = BenchPlan(("gla", "softmax-gla", "paper-softmax-gla"), SHAPE)
    seconds = {"gla": [1.0, 2.0, 4.0], "softmax-gla": [1.1, 2.2, 4.4], "paper-softmax-gla": [1.3, 2.6, 5.2]}
    models = {name: {"seconds": own} for name, own in seconds.items()}
    rows = report.overheads([{"point": vars(Point("training", 16)), "models": models}], plan).rows
    assert rows == [("gla", "+10.0% ± 0.0%"), ("gla, published form", "+30.0% ± 0.0%")]


@pytest.mark.parametrize(("count", "said"), [(1, "1 layer, 64 wide"), (2, "2 layers, 64 wide")])
def test_the_page_names_the_models_and_each_machine_once(count, said, tmp_path):
    plan = BenchPlan(("gla", "softmax-gla"), replace(SHAPE, layers=count), threads=count)
    models = {"gla": {"seconds": [1.0]}, "softmax-gla": {"seconds": [1.1]}}
    held = [
        {"point": vars(Point("training", length)), "models": models, "clock": "CPU", "environment": about}
        for length, about in ((16, {"processor": "A", "date": 1}), (32, {"processor": "A", "date": 2}),
                              (64, {"processor": "B", "date": 3}))
    ]  # fmt: skip
    assert report.environments(held) == [{"processor": "A"}, {"processor": "B"}]
    page = report.write_report(held, report.rows(held, plan), plan, tmp_path).read_text("utf-8")
    assert said in page and f"with {count} thread{'s' * (count - 1)}." in page
    assert "16 (one round)" in page, "± 0 % would say that there is no noise"


def test_lines_tell_models_apart_and_panels_name_their_rows():
    lines = {"gla": "-", "softmax-gla": "--", "transformers-llama": ":"}
    found = {name: report.line_style(name, list(lines)) for name in lines}
    assert {name: look["ls"] for name, look in found.items()} == lines
    assert found["gla"]["color"] == found["softmax-gla"]["color"] != found["transformers-llama"]["color"]
    line = {"left_out": None, "tokens_per_second": "5"}
    figure = report.panels("training", {"gla": {(16, 1): line, (32, 1): line, (16, 4): line}}, "x", "y")
    assert [ax.get_title() for ax in figure.axes] == ["1 row", "4 rows"]
    assert [list(ax.lines[0].get_xdata()) for ax in figure.axes] == [[16, 32], [16]]


def test_the_legend_names_a_model_that_the_last_panel_lacks():
    line = {"left_out": None, "tokens_per_second": "5"}
    lost = line | {"left_out": "out of memory"}
    found = {"gla": {(16, 1): line, (16, 4): line}, "retnet": {(16, 1): line, (16, 4): lost}}
    legend = report.panels("training", found, "x", "y").axes[-1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["gla", "retnet"]


def test_a_cache_that_would_not_fit_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(measure, "free", lambda plan: 2**30)
    plan = BenchPlan(("gla", "transformer"), SHAPE, rounds=1)
    found = measure.measure(Point("decoding", 10**6), plan)
    # keys and values, 64 wide, of 1e6 tokens in float32: 0.48 GiB, where a quarter of 1 GiB is at hand
    reason = "its cache needs 0.5 GiB, more than 1/4 of 1.0 GiB of free memory"
    assert found["transformer"] == {"left_out": reason} and found["gla"]["seconds"]


def test_a_cache_has_a_quarter_of_what_those_before_it_have_left(monkeypatch):
    left = iter([2**20, 2**17])
    monkeypatch.setattr(measure, "free", lambda plan: next(left))
    plan = BenchPlan(("transformer", "gpt"), SHAPE, rounds=1)
    found = measure.measure(Point("decoding", 100), plan)
    assert found["transformer"]["seconds"] and found["gpt"]["left_out"].startswith("its cache needs 0.0 GiB, more than")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("can't allocate memory: you tried to allocate 17179864000 bytes."),
    ],
)
def test_a_decoder_that_does_not_fit_leaves_the_others_to_be_measured(error, monkeypatch):
    """PyTorch has a class of its own for the error on accelerators alone."""

    def fits(name, plan):
        if name == "gla":
            raise error
        return build(name, plan.shape)

    monkeypatch.setattr(measure, "built", fits)
    found = measure.measure(Point("decoding", 100), BenchPlan(("gla", "retnet", "gpt"), SHAPE, rounds=1))
    assert found["gla"] == {"left_out": "out of memory"} and len(found["retnet"]["seconds"]) == 1
    assert found["gpt"]["how"] == CACHED and found["gpt"]["bytes"] == cache_bytes("gpt", SHAPE, 100, 4)


@pytest.mark.parametrize("what", ["training", "memory"])
def test_rows_that_do_not_fit_are_left_out(what):
    point = Point(what, 2**31 - 648, 10**6)  # 16 PB of ids
    assert measure.measure(point, BenchPlan(("gla",), SHAPE, rounds=1)) == {"gla": {"left_out": "out of memory"}}


def test_an_error_of_another_kind_is_raised(monkeypatch):
    monkeypatch.setattr(measure, "built", lambda name, plan: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        measure.measure(Point("training", 8), BenchPlan(("gla",), SHAPE, rounds=1))


def test_a_checkpoint_is_measured_at_its_own_sizes(tmp_path):
    folder = str(release("kimi_linear", tmp_path))
    plan = BenchPlan(named(f"gla,{folder}"), SHAPE, rounds=1)
    assert plan.models == ("gla", "softmax-gla", folder)
    assert cache_bytes(folder, SHAPE, 10, 4) == 4 * 10 * (16 + 4)  # the latent and the shared key of one layer
    measured = [measure.record(Point(what, 12), None, plan) for what in ("training", "prefill", "decoding")]
    rows = report.rows(measured, plan)
    sizes = {(row["model"], row["layers"], row["hidden_size"]) for row in rows if row["seconds"]}
    assert sizes == {("gla", 1, 64), ("softmax-gla", 1, 64), (folder, 2, 32)}


def test_a_folder_that_has_changed_is_read_again(tmp_path):
    for hidden_size in (32, 64):
        tiny.config("gla", hidden_size=hidden_size).save_pretrained(tmp_path)
        assert build(str(tmp_path), SHAPE).config.hidden_size == hidden_size


def test_a_folder_with_the_name_of_a_mixer_is_no_checkpoint(saved_model, tmp_path, monkeypatch):
    shutil.copytree(saved_model, tmp_path / "gla")
    monkeypatch.chdir(tmp_path)
    assert named(f"{saved_model},gla") == (str(saved_model), "gla", "softmax-gla")
    assert build("gla", replace(SHAPE, layers=3)).config.num_hidden_layers == 3


MISTAKES = {
    "--what=speed; expected some of memory": {"what": "memory,speed"},
    "--lengths=0; expected positive integers": {"lengths": "0"},
    "--lengths=; expected positive integers": {"lengths": ""},
    "--batch-sizes=1,-2; expected positive": {"batch_sizes": "1,-2"},
    "--contexts=1e4; expected positive": {"contexts": "1e4"}, "--layers=0; expected at least 1": {"layers": 0},
    "--rounds=0; expected at least 1": {"rounds": 0}, "--dtype='float8'; expected one of": {"dtype": "float8"},
    "'glaa'": {"mixers": "glaa"}, "--mixers='' names none": {"mixers": ""},
    "transformers-mamba' is unknown": {"mixers": "transformers-mamba"}, "heads=3": {"heads": 3},
    "--hidden-size=1000; expected a multiple of 64": {"mixers": "transformers-llama", "hidden_size": 1000},
    "is no folder of reports or runs": {"output": Path(__file__).parent},
}  # fmt: skip


@pytest.mark.parametrize("said", MISTAKES)
def test_user_errors_are_named_before_any_measurement(said, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured"))
    defaults = {name: parameter.default for name, parameter in inspect.signature(cli_eval.bench).parameters.items()}
    with pytest.raises(InputError, match=re.escape(said)):
        cli_eval.bench(**defaults | {"device": "cpu", "output": tmp_path / "bench"} | MISTAKES[said])
    assert not (tmp_path / "bench").exists()
