"""The benchmarks run, and write what they found."""

import csv
import json
import sys
import types
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import typer

import exported
import gpu
import gpu_models
import gpu_op
import gpu_tables
import leaderboard
import model
import op
import tables
from gpu_measure import Machine
from headrace.benchmarking.measure import built
from headrace.benchmarking.models import Shape, build
from headrace.benchmarking.plan import BenchPlan
from headrace.hf.cache import NAME as CACHE
from headrace.ops.backends.base import Kernel
from headrace.ops.backends.native import library as native
from headrace.ops.dispatch import BACKENDS
from headrace.ops.reference import literal
from headrace.verification.verify import relative
from peers import FAMILIES, PEERS, load

SMALL = Shape(1, hidden_size=64, heads=2, vocab_size=300)


@pytest.fixture
def lines(tmp_path):
    """A file to write to, and a function that reads it back."""
    path = tmp_path / "results" / "rows.csv"
    return path, lambda: list(csv.DictReader(path.read_text("utf-8").splitlines()))


@pytest.mark.parametrize("path", sorted(Path(op.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_every_script_finds_what_it_imports(path):
    assert import_module(path.stem).__doc__


def test_op_times_ours_and_every_peer_it_can_check(lines):
    path, read = lines
    for _ in range(2):  # the second run appends
        op.main(quick=True, family=["linear"], rounds=1, budget=30.0, peers="", threads=1, device="cpu", output=path)
    rows = read()
    runners = {row["runner"] for row in rows}
    assert {"headrace torch", "headrace torch, heads competing", "torch scaled_dot_product_attention"} <= runners
    ours = [row for row in rows if row["runner"] == "headrace torch"]
    assert len(ours) == 2 * 8  # two sizes, two lengths, forward with and without backward
    assert all(float(row["cpu_ms"]) > 0 and float(row["error"]) < 1e-5 for row in rows)


def test_models_are_trained_decoded_and_prefilled(lines, monkeypatch):
    path, read = lines
    monkeypatch.setitem(model.SIZES, "340M", SMALL)
    model.train(layers=[1, 2], tokens=16, rounds=2, model=["headrace", "Llama"], output=path)
    model.decode(context=100, rounds=2, batch=2, model=["headrace gla", "Mamba2", "ONNX Runtime gla"], output=path)
    model.prefill(layers=1, tokens=100, model=["headrace gla"], output=path)
    rows = read()
    assert [(row["what"], row["layers"]) for row in rows] == [("train", "1")] * 5 + [("train", "2")] * 5 + [
        ("decode", "1")
    ] * 6 + [("prefill", "1")]
    assert [row["name"] for row in rows[10:]] == [
        "headrace gla", "transformers Mamba2", "headrace gla, weights in bfloat16", "headrace gla, weights in int8",
        "ONNX Runtime gla", "ONNX Runtime gla, weights in int8", "headrace gla",
    ]  # fmt: skip
    assert all(float(row["seconds"]) > 0 and float(row["tokens_per_second"]) > 0 for row in rows)
    assert float(rows[0]["ratio"]) == 1 and len({row["parameters"] for row in rows if "gla" in row["name"]}) > 1
    assert rows[10]["parameters"] == rows[12]["parameters"] == rows[13]["parameters"]


def test_models_keep_the_dtype_of_their_weights():
    plan = BenchPlan((), shape=SMALL)
    for name, dtype in (("gla-bfloat16", torch.bfloat16), ("gla", torch.float32)):
        assert {p.dtype for p in built(name, plan).parameters()} == {dtype}


def test_a_model_that_is_left_out_is_said_and_the_others_are_kept(monkeypatch, capsys):
    found = {"a": {"seconds": [2.0, 4.0]}, "b": {"left_out": "out of memory"}}
    monkeypatch.setattr(model, "measure", lambda point, plan: found)
    monkeypatch.setattr(model, "row", lambda *args: {})
    (row,) = model.timed("train", model.Point("training", 16), None, {"first": "a", "second": "b"})
    assert row["seconds"] == 3.0 and row["over"] == "first"
    assert "not timed: second: out of memory" in capsys.readouterr().out


def test_models_that_cannot_be_timed_are_one_sentence(monkeypatch):
    with pytest.raises(typer.BadParameter, match=r"\['glaa'\]; expected a part of the name of a model"):
        model.select(["glaa"], model.TOKEN)
    monkeypatch.setattr(model, "measure", lambda point, plan: {"a": {"left_out": "out of memory"}})
    with pytest.raises(SystemExit, match="train: no model was timed"):
        model.timed("train", model.Point("training", 16), None, {"first": "a"})


def test_a_peer_computes_its_constants_in_its_first_call(monkeypatch):
    """MiniMax's layer has the powers of its decays when it is made. Other decays are not mistaken for them."""
    (peer,) = (peer for peer in PEERS if "Lightning" in peer.name)
    tensors = FAMILIES["fixed"].inputs(T=300, K=8, V=8, dtype=torch.float64)
    for scale in (1, 2):
        given = tensors | {"log_decay": scale * tensors["log_decay"]}
        arguments = peer.arguments(given)
        peer(arguments)
        with monkeypatch.context() as patched:
            patched.setattr(load(peer.source), "decay_factors", None)
            torch.testing.assert_close(peer(arguments)[0], literal(**given)[0])


def test_models_of_an_estimate_are_named_as_those_that_were_measured():
    row = {"threads": "1", "tokens": "2048", "name": "transformers Mamba2"}
    rows = [row | {"layers": layers, "seconds": seconds} for layers, seconds in (("1", "2.0"), ("4", "5.0"))]
    (estimate,) = tables.extrapolated(rows)
    assert "| transformers Mamba2 (reference code), 1 thread(s) | 81.9 | 1 and 4 layers |" in estimate


def test_the_fastest_peer_is_named(monkeypatch):
    """Faster or not. No peer is softmax attention, nor what has other weights or ran at another time."""
    cell = {
        "threads": "1", "family": "kda", "dtype": "float32", "T": "2048", "K": "128", "V": "128", "mode": "forward",
        "cpu_ms": "8", "us_per_layer": "9", "date": "1",
    }  # fmt: skip
    times = {"headrace native": "1", "fla chunk": "3", "ggml wkv": "2", "torch scaled_dot_product_attention": "0.1"}
    op_rows = [cell | {"runner": runner, "ratio": ratio} for runner, ratio in times.items()]
    op_rows.append(cell | {"runner": "idiap", "ratio": "0.1", "date": "2"})
    sizes = {"threads": "1", "what": "decode", "layers": "24", "width": "1024", "tokens": "9", "batch": "1", "over": ""}
    named = {  # name: ratio, date
        "headrace gla": ("2", "1"), "ONNX Runtime gla": ("1", "1"), "ONNX Runtime gla, weights in int8": ("0.1", "1"),
        "transformers Llama": ("0.1", "1"), "llama.cpp gla": ("0.1", "2"),
    }  # fmt: skip
    sizes["seconds"] = "0.1"
    model_rows = [sizes | {"name": name, "ratio": ratio, "date": date} for name, (ratio, date) in named.items()]
    rows = {"op.csv": op_rows, "model.csv": model_rows}
    rows["step.csv"] = [op_rows[0] | {"runner": "headrace"}, op_rows[1], op_rows[-1]]
    monkeypatch.setattr(tables, "read", rows.get)
    found = [line.strip("| ").split(" | ")[1:] for line in tables.speed().splitlines()[2:]]
    assert found == [
        ["8.0 ms", "ggml wkv", "**2.00**"], ["9 µs", "fla chunk (reference code)", "**3.00**"],
        ["100.0 ms", "ONNX Runtime gla", "**0.50**"],
    ]  # fmt: skip
    assert [line.split(" | ")[0] for line in tables.losses().splitlines()[2:]] == ["| ONNX Runtime gla"]


def test_a_runtime_that_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(model, "missing", lambda runtime: None if runtime == "ONNX Runtime" else "it is away")
    chosen = model.select(["mamba2"], model.TOKEN)
    assert [*chosen] == [label for label in model.TOKEN if "mamba2" in label and "llama" not in label]
    assert "not timed: llama.cpp mamba2: it is away" in capsys.readouterr().out


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize(("runtime", "mixer"), [(runtime, x) for runtime, own in model.EXPORTED.items() for x in own])
@torch.no_grad()
def test_exported_models_continue_sequences_as_ours(runtime, mixer, weights):
    """A prompt, and two tokens more. A number of 8 bits is wrong by 2⁻⁸ of the largest of its block."""
    if (reason := exported.missing(runtime)) is not None:
        pytest.skip(reason)
    tokens = torch.randint(300, (3, 20))
    truth = build(mixer, SMALL).double().eval()(tokens).logits[:, -3:]
    theirs, past, logits = exported.exported(runtime, mixer, weights, SMALL), {}, []
    for piece in tokens.split([18, 1, 1], 1):
        out = theirs(input_ids=piece, use_cache=True, logits_to_keep=1, **past)
        past = {CACHE: getattr(out, CACHE)}
        logits.append(out.logits[:, -1:].clone())
    assert relative(torch.cat(logits, 1), truth) <= {"float32": 1e-5, "int8": 2**-4}[weights]


@pytest.fixture
def rows_of(monkeypatch, capsys):
    """The rows that stages of the op print on the CPU for these families, and the exit code."""

    def measured(*stages, families=("scalar", "delta")):
        monkeypatch.setenv("SMALL", "1")
        monkeypatch.setattr(gpu_op, "DRY", gpu_op.DRY._replace(families=families))
        code = gpu_op.main(*stages)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()], code

    return measured


def test_the_op_on_a_gpu_is_rehearsed_on_the_cpu(rows_of):
    rows, code = rows_of(*gpu_op.STAGES)
    assert not code and [row["name"] for row in rows if row.get("begun")] == list(gpu_op.STAGES)
    rows = [row for row in rows if not row.get("begun")]
    assert {row["subject"] for row in rows if row["name"] == "op"} >= {"torch", "torch, gates"}
    errors = [row for row in rows if row["unit"] == "relative"]
    # An output is rounded once to bfloat16 (2⁻⁹), a gradient and the weights that it is made of once each. Where the
    # processor has products of bfloat16, native kernels round the factors too.
    for row in errors:
        products = 2**-8 * (native.instructions == "avx512bf16" and row["subject"].startswith("native"))
        most = {"output": 2**-9 + products, "gradients": 2**-7, "state": 1e-5 + products}
        assert row["value"] <= most[row["measure"]], row
    assert {row["measure"] for row in errors} == {"output", "gradients", "state"}
    assert all(row["value"] > 0 for row in rows)


def test_peers_that_can_be_imported_are_timed(rows_of, monkeypatch):
    """Helion's examples take heads first."""
    given = []

    def chunked_linear_attn(q, k, v, g, beta=None, return_final_state=False):
        given.append((q.shape, g.shape))
        out = (q * k).sum(-1, keepdim=True) * v * g[..., None].exp()
        return out, out.sum(2)

    module = types.SimpleNamespace(chunked_linear_attn=chunked_linear_attn)
    monkeypatch.setitem(sys.modules, gpu_op.HELION, module)
    rows, _ = rows_of("op", families=("scalar",))
    ways = {row["measure"] for row in rows if row.get("subject") == "helion"}
    assert {"fwd", "f+b"} <= ways and set(given) == {((1, 2, 70, 16), (1, 2, 70))}


def test_a_backend_that_fails_does_not_end_the_gpu_benchmark(rows_of, monkeypatch):
    def broken(call):
        raise RuntimeError("misaligned address")

    kernel = Kernel(broken, lambda call: None)
    monkeypatch.setitem(BACKENDS, "native", BACKENDS["torch"]._replace(linear_attention=kernel))
    rows, code = rows_of("correctness")
    failed = {(row["subject"], row["failed"]) for row in rows if "failed" in row}
    assert not code and failed == {("native", "RuntimeError: misaligned address")}
    assert any(row.get("subject") == "torch" and row["measure"] == "gradients" for row in rows)


def test_a_stage_that_fails_leaves_the_rest_to_a_new_process(rows_of, monkeypatch):
    """gpu.py goes on behind the stage that had begun."""

    def broken(machine, sizes):
        yield "machine", "", "copy", 1.0, "GB/s", ""
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(gpu_op.STAGES, "op", broken)
    rows, code = rows_of("op", "ceilings")
    assert code == 3 and [row["name"] for row in rows] == ["op"] * 3
    assert rows[-1]["failed"] == "RuntimeError: an illegal memory access was encountered"


def test_no_graph_is_captured_after_one_that_failed(monkeypatch):
    def failing(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    machine = Machine("cuda")
    monkeypatch.setattr("gpu_measure.captured", lambda *_: (None, "replay"))
    assert machine.graph(print) == machine.graph(print) == "replay"
    monkeypatch.setattr("gpu_measure.captured", failing)
    with pytest.raises(RuntimeError, match="not permitted"):
        machine.graph(print)
    assert machine.graph(print) is None


def test_the_times_of_a_gpu_are_over_those_of_a_copy(monkeypatch):
    """[1, 1000, 1, 10, 15] in bfloat16 is 0.1 MB forward and 0.2 MB with the gradients; a copy moves 100 GB/s."""
    values = {"fwd": "0.002", "f+b": "0.008", "f+b launches": "3", "f+b memory": "5", "f+b host": "0.5"}
    row = {"stage": "op", "subject": "triton", "shape": "scalar [1, 1000, 1, 10, 15]"}
    rows = [row | {"measure": name, "value": value} for name, value in ({"fwd": "9"} | values).items()]
    monkeypatch.setattr(gpu_tables.record, "read", lambda path: [rows[0] | {"value": "9"}, *rows])
    line = gpu_tables.op(100.0).splitlines()[-1]
    assert line == "| scalar: triton | 0.00 | 50 % | 0.01 | 25 % | 3 | 5 | 0.5 |"
    rows.append(row | {"measure": "f+b graph", "value": "0.004"})
    assert "| 0.00 | 50 % | 3 |" in gpu_tables.op(100.0).splitlines()[-1], "where no launch waits for the host"


SCRIPT = """
import json, sys, time
for name in sys.argv[1:]:
    print(json.dumps({"name": name, "begun": True}), flush=True)
    if name == "broken":
        print(json.dumps({"name": name, "failed": "AcceleratorError: an illegal memory access"}), flush=True)
        sys.exit(3)
    if name == "endless":
        time.sleep(60)
    print(json.dumps({"name": name, "tokens_per_second": 5.0, "ms": 1.0, "peak_gib": None}), flush=True)
"""


def test_a_stage_of_models_goes_on_in_a_new_process_and_ends_in_time(tmp_path, capsys):
    run = gpu.Run(tmp_path, 1.0)
    (tmp_path / "script.py").write_text(SCRIPT)
    stage = gpu.Stage(30.0, (str(tmp_path / "script.py"),), ("first", "broken", "last"))
    gpu.measure(run, "train", stage, {"commit": "abc"})
    gpu.measure(run, "decode", stage._replace(seconds=5.0, names=("endless", "never")), {"commit": "abc"})
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    found = [(row["stage"], row["name"], row.get("code", 0)) for row in rows]
    assert found == [
        ("train", "first", 0), ("train", "broken", 0), ("train", "broken", 3), ("train", "last", 0),
        ("decode", "endless", None),
    ]  # fmt: skip
    assert "failed" in rows[1] and all(row["commit"] == "abc" for row in rows)
    assert gpu.table(rows).count("tokens/s") == 2 and "FAILED" in gpu.table(rows)


def test_a_generation_has_the_peak_memory_of_its_own_calls(monkeypatch, tmp_path):
    """Not of 64 rows, with which the models compile."""
    peaks, model = [0], Mock()
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))
    monkeypatch.setattr(gpu_models, "DEVICE", "cuda")
    monkeypatch.setattr(gpu_models, "build", lambda name: model)

    def generation(model, rows, sampled, new):
        return lambda: peaks.append(rows * 2**30) or torch.zeros(rows, 16 + new)

    monkeypatch.setattr(gpu_models, "generation", generation)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", peaks.clear)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: max(peaks))
    for unused in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, unused, lambda: None)
    rows = list(gpu_models.decode("fla:gla"))
    assert [row["batch"] for row in rows] == [row["peak_gib"] for row in rows] == [*gpu_models.BATCHES]


def test_kernels_are_of_a_class_by_their_names():
    names = {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products", "gradients": "recurrence", "scan": "recurrence",
        "triton_poi_fused_mul_silu_3": "elementwise, fused", "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::vectorized_elementwise_kernel<4>": "elementwise", "conv_depthwise2d_forward": "convolution",
    }  # fmt: skip
    assert {name: gpu_models.kind_of(name) for name in names} == names


def test_the_fastest_way_of_a_mixer_is_its_efficiency(monkeypatch):
    """1,000 operations a token; an H200 makes 989 · 10^12 a second."""
    monkeypatch.setattr(gpu_tables, "flops_of", lambda mixer: 1000)
    about = {"machine": "NVIDIA H200", "commit": "abc", "stage": "train"}
    names = {"headrace:gla": 989e8, "headrace:gla:compiled": 1978e8, "headrace:kda": 989e8}
    rows = [about | {"name": name, "tokens_per_second": rate} for name, rate in names.items()]
    rows += [about | {"name": "headrace:kda", "failed": "…"}, about | {"stage": "fla-train", "name": "fla:gla"}]
    found = {row["mixer"]: (row["efficiency"], row["compiled"]) for row in gpu_tables.efficiencies(rows)}
    assert found == {"gla": (0.2, True), "kda": (0.1, False)}


def test_tables_of_training_steps_are_of_compiled_blocks(monkeypatch):
    """Of a whole run, which measures and profiles both."""
    rows = []
    for name, ms in {"headrace:gla:compiled:profile": 100.0, "headrace:gla:profile": 200.0}.items():
        own = {"date": "1", "stage": "train", "name": name, "tokens_per_second": 1e5 / ms, "parameters": 1e6}
        rows += [
            own | {"ms": ms, "peak_gib": 2.0},
            own | {"classes": {"products": [ms, 5]}, "device_ms": ms, "launches": 5},
        ]
    monkeypatch.setattr(gpu_tables, "kept", lambda: rows)
    found = gpu_tables.models()
    assert gpu_tables.trained(found).splitlines()[2:] == ["| gla | 1M | 1,000 | 100 | 2.0 |  |  |  |"]
    (line,) = gpu_tables.profiled(found).splitlines()[2:]
    assert line.startswith("| headrace gla | 100 | 100.0 |")


def test_generate_is_called_as_often_for_each_library(monkeypatch):
    calls, about = [], {"config": types.SimpleNamespace(), "generation_config": types.SimpleNamespace()}
    engine = types.SimpleNamespace(about=lambda model: "")
    model = types.SimpleNamespace(**about, engine=engine, eval=lambda: model)
    monkeypatch.setattr(gpu_models, "build", lambda name: calls.append([]) or model)
    monkeypatch.setattr(
        gpu_models, "generation",
        lambda model, rows, sampled, new: lambda: calls[-1].append((rows, sampled, new)) or torch.zeros(rows, 16 + new),
    )  # fmt: skip
    for name in ("headrace:gla", "fla:gla"):
        list(gpu_models.decode(name))
    ours, theirs = calls
    assert theirs and all(ours.count(call) == theirs.count(call) for call in theirs)


def test_whole_models_are_rehearsed_on_the_cpu(monkeypatch):
    sizes = {"SIZES": gpu_models.SMALL, "B": 1, "T": 40, "STEPS": 1, "CASES": ((False, 3), (True, 3)), "BATCHES": (2,)}
    for name, value in sizes.items():
        monkeypatch.setattr(gpu_models, name, value)
    monkeypatch.setattr(gpu_models.build, "__defaults__", (1,))
    (row,) = gpu_models.train("headrace:mamba2")
    assert row["tokens_per_second"] > 0 and row["parameters"] > 0
    rows = list(gpu_models.decode("headrace:gla"))
    assert [row["sampled"] for row in rows] == [False, True] and all(row["tokens_per_second"] > 0 for row in rows)


def test_overlaps_of_the_leaderboard_are_those_of_its_scores():
    """Of the accuracies of parity, 5 seeds each: apart, then overlapping, then with a run that diverged."""
    kept = [row for row in leaderboard.rows.read(leaderboard.KEPT) if row["comparison"] == "parity"]
    own = [row | {"by_length": {}, "scores": {"accuracy": 0.5 + 0.01 * row["seed"]}} for row in kept[:5]]

    def told(*scores):
        pair = zip(own, scores, strict=True)
        rows = [row | {"mixer": "softmax-x", "scores": {"accuracy": score} if score else {}} for row, score in pair]
        return leaderboard.competing([*(row | {"mixer": "x"} for row in own), *rows])

    assert "overlap in 0 of 1 cells of both lengths, all but parity of x at the training length." in told(*5 * [0.9])
    assert "overlap in 1 of 1 cells of both lengths." in told(0.1, *4 * [0.9])
    assert "overlap in 0 of 0 cells" in told(None, *4 * [0.9])


def test_equal_states_of_the_leaderboard_are_those_that_its_models_had():
    kept = leaderboard.rows.read(leaderboard.KEPT)
    measured = {row["mixer"]: row["state_bytes"] for row in kept if row["comparison"] == "parity"}
    near = {mixer for mixer, size in measured.items() if abs(size / measured["gated-deltanet"] - 1) < 0.05}
    assert set(leaderboard.sized(kept)) == near >= {"gated-deltanet", "negative-gated-deltanet"}
