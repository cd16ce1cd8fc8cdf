"""Without --device every command computes on the accelerator, where there is one."""

import pytest
import torch

from headrace import cli
from headrace.device import on_device
from headrace.errors import InputError
from headrace.train.pool import worker_count


@pytest.fixture(params=["cuda", "mps", None])
def accelerator(request, monkeypatch):
    found = None if request.param is None else torch.device(request.param)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    return request.param


def test_the_default(accelerator):
    assert on_device(None) == (accelerator or "cpu")
    assert on_device(None, float64=True) == ("cuda" if accelerator == "cuda" else "cpu")
    assert on_device("cpu") == "cpu"


def test_workers_do_not_share_an_accelerator(accelerator):
    if accelerator is not None:
        assert worker_count(None) == 1
    assert worker_count(3) == 3


@pytest.mark.parametrize("name", ["tpu7", "xpu:99"])
def test_a_device_that_is_not_here(name):
    with pytest.raises(InputError, match=f"--device='{name}' cannot be used"):
        on_device(name)


@pytest.mark.parametrize(
    ("command", "seen_by"),
    [
        ("generate model --prompt a", "headrace.generate.on_device"),
        ("eval model --suite piqa", "headrace.device.on_device"),
        ("bench --layers 1", "headrace.device.on_device"),
        ("verify --mixers gla", "headrace.cli.on_device"),
    ],
)
def test_every_command_asks_the_one_rule(command, seen_by, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    asked = []

    def rule(name, float64=False):
        asked.append(name)
        raise InputError("enough")

    monkeypatch.setattr(seen_by, rule)
    monkeypatch.setattr("headrace.generate.load", lambda path: torch.nn.Linear(1, 1))
    for device in ([], ["--device", "meta"]):
        monkeypatch.setattr("sys.argv", ["headrace", *command.split(), *device])
        with pytest.raises(SystemExit):
            cli.main()
    assert asked == [None, "meta"]
