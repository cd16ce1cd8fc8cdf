"""Without --device every command computes on the accelerator, where there is one."""

import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.benchmarking import measure
from headrace.benchmarking.plan import BenchPlan, Point
from headrace.files import engine
from headrace.files.devices import SLOW, UNSEEN, all_devices, note_speed, on_device, see_only
from headrace.files.workers import Worker, place_workers
from headrace.training.loop import Updates
from headrace.training.processes import Processes
from headrace.training.transfer import Transfer
from headrace.utils.errors import InputError


@pytest.fixture(params=["cuda", "mps", None])
def accelerator(request, monkeypatch):
    device = None if request.param is None else torch.device(request.param)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device is not None)
    # PyTorch's build for CUDA names its accelerator on a machine without one, unless asked whether it is there.
    built_for = device or torch.device("cuda")
    named = lambda check_available=False: device if check_available else built_for  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", named)
    return request.param


def test_default_device_is_the_accelerator(accelerator):
    assert on_device(None) == (accelerator or "cpu")
    assert on_device(None, float64=True) == ("cuda" if accelerator == "cuda" else "cpu")
    assert on_device("cpu") == on_device("cpu:0") == "cpu" and on_device("auto") == on_device(None)


@pytest.fixture
def four_gpus(monkeypatch):
    cuda, empty = torch.device("cuda"), torch.empty
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))


@pytest.mark.parametrize(
    ("device", "workers", "places"),
    [
        (None, None, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]), ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 6, ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1"]), ("cuda:1", None, ["cuda:1"]),
        ("cuda:1", 3, ["cuda:1"] * 3), ("cpu", 3, ["cpu"] * 3),
    ],
)  # fmt: skip
def test_workers_are_spread_over_the_gpus(four_gpus, device, workers, places):
    assert place_workers(all_devices(device), workers) == places


def test_workers_without_several_gpus(accelerator, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(5)), raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    places = {"cuda": ["cuda:0"], "mps": ["mps"], None: ["cpu"] * 5}
    assert place_workers(all_devices(None), None) == places[accelerator]
    with pytest.raises(InputError, match="--workers=0; expected at least 1"):
        place_workers(["cpu"], 0)


@pytest.mark.parametrize(
    ("visible", "device", "seen"),
    [(None, "cuda:2", "2"), ("5,7,6", "cuda:1", "7"), ("5,7", "cpu", ""), (None, "cpu", ""), ("5,7", "mps", "5,7")],
)
def test_worker_sees_only_its_gpu(visible, device, seen, monkeypatch):
    """A worker takes the first GPU that it sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    see_only(device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_an_arm_is_trained_on_the_device_that_is_asked_for(device, monkeypatch):
    from headrace.comparison import arm, defaults

    def there():
        raise LookupError("the accelerator")

    monkeypatch.setattr(arm, "device_of_this_process", there)
    recipe = replace(defaults.PAIR.recipe, steps=1, evaluations=1, held_out=8)
    one = replace(defaults.PAIR, mixers=("retnet",), recipe=recipe).arms()[0]
    with nullcontext() if device == "cpu" else pytest.raises(LookupError):
        arm.train(one, lambda *news: None, device)


@pytest.mark.parametrize("name", ["tpu7", "xpu:99"])
def test_missing_device_is_refused(name):
    with pytest.raises(InputError, match=f"--device='{name}' cannot be used"):
        on_device(name)


COMMANDS = [
    "generate MODEL --prompt a", "inspect MODEL --text abc", "eval MODEL --suite piqa", "serve MODEL --port 0",
    "linearize MODEL --data MODEL --output new", "bench --mixers ./MODEL", "verify --mixers gla",
    "verify transformers:mamba2", "compare --text MODEL",
]  # fmt: skip


@pytest.mark.parametrize("device", ["tpu7", "cuda"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_missing_device(command, device, saved_model, refusal, monkeypatch, tmp_path):
    """Before it reads the model, which has no weights and no tokenizer."""
    monkeypatch.chdir(tmp_path)
    Path("MODEL").mkdir()
    shutil.copy(saved_model / "config.json", "MODEL")
    assert f"--device={device!r} cannot be used" in refusal(*command.split(), "--device", device)


@pytest.mark.parametrize(("device", "name"), [("cpu", "cpu"), ("cuda:1", "GPU cuda:1"), ("mps", "mps")])
def test_a_measurement_names_its_device_beside_a_gpu(device, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    monkeypatch.setattr(measure, "measure", lambda point, plan: {})
    result = measure.record(Point("training", 8), None, BenchPlan((), device=device))
    assert result["environment"]["device"] == name


@pytest.mark.parametrize(("device", "name"), [(None, "mps"), ("cpu", "cpu")])
def test_a_row_of_a_worker_names_its_device_beside_an_accelerator(device, name, monkeypatch, tmp_path):
    """Apple's GPU, which no process hides; None is the process that the user started, as it trains a model."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    engine.keep(tmp_path, engine.Point("one", Path("one.json"), 1), lambda value, worker: {}, Worker(device, print))
    assert engine.read(tmp_path / "one.json")["environment"]["device"] == name


@pytest.mark.parametrize(
    ("device", "precision", "instructions", "said"),
    [
        ("cpu", "bfloat16", {"avx512_f": True, "avx512_bf16": False}, f"{SLOW}\n"),
        ("cpu", "bfloat16", {"neon": True, "bf16": True}, ""),
        ("cpu", "bfloat16", {}, ""),
        ("cpu", "float32", {"avx512_f": True}, ""),
        ("cuda", "bfloat16", {"avx512_f": True}, ""),
    ],
)
def test_bfloat16_without_instructions_is_said_once(device, precision, instructions, said, monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    note_speed.cache_clear()
    for _ in range(2):
        note_speed(device, precision)
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_gpu_on_which_our_kernels_have_not_run_is_said_once(capability, backend, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("HEADRACE_BACKEND", backend)
    note_speed.cache_clear()
    for _ in range(2):
        note_speed("cuda:0", "bfloat16")
    assert capsys.readouterr().err == (f"{UNSEEN}\n" if backend == "auto" and capability[0] != 9 else "")


def test_training_in_bfloat16_notes_what_is_slow(monkeypatch):
    noted = []
    monkeypatch.setattr("headrace.training.loop.note_speed", lambda *given: noted.append(given))
    Updates(torch.nn.Linear(1, 1), Transfer(), lambda *_: None, Processes(torch.device("cpu")), "bfloat16")
    assert noted == [("cpu", "bfloat16")]
