"""Configurations, weights and checkpoints written by earlier versions are read as what they were.

`python tests/hf/test_stored.py` writes tests/hf/stored/models.json anew; a change of
what it holds breaks stored models.
"""

import json
import math
import shutil
import tarfile
import zlib
from pathlib import Path

import pytest
import torch

from headrace import HeadraceConfig, HeadraceForCausalLM, InputError, load, zoo
from headrace.data import open_data
from trained import train

FOLDER = Path(__file__).parent / "stored"
STORED = FOLDER / "models.json"
SIZES = {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 12}
KEPT = ("mixer", "style")  # what a configuration holds beside SIZES and the values that a class gives it


def filled(model):
    """With weights that their names and places decide."""
    for name, weight in model.state_dict().items():
        if weight.is_floating_point():
            place = torch.arange(weight.numel(), dtype=torch.float64).view(weight.shape)
            weight.add_(0.1 * torch.sin(0.7 * place + zlib.crc32(name.encode()) % 628 / 100))
    return model


@torch.no_grad()
def described(config):
    """Its configuration, its parameters' names and shapes, and two logits of each of three tokens."""
    torch.manual_seed(0)  # of nothing that is kept: every weight at its first value is written over or a constant
    model = HeadraceForCausalLM(config).double().eval()
    for weight in model.parameters():
        weight.zero_()
    ids = torch.arange(1, 13)[None] * 7 % 23
    logits = filled(model)(ids).logits[0, [0, 5, 11], :2].flatten()
    stored = {name: value for name, value in json.loads(config.to_json_string()).items() if name in KEPT}
    shapes = {name: "x".join(map(str, weight.shape)) for name, weight in model.state_dict().items()}
    return {"config": stored, "weights": shapes, "logits": logits.tolist()}


def write():
    every = {name: described(HeadraceConfig(mixer=name, **SIZES)) for name in zoo.names()}
    STORED.parent.mkdir(exist_ok=True)
    lines = (f"{json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}" for name, one in every.items())
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


MODELS = json.loads(STORED.read_text("utf-8"))


def holds(now, then):
    """Whether a configuration has every value of a stored one; it may have fields that came later."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(name in now and holds(now[name], then[name]) for name in then)
    return now == then


@pytest.mark.parametrize("name", MODELS)
def test_stored_models_give_stored_outputs(name):
    stored = MODELS[name]
    result = described(HeadraceConfig(**stored["config"], **SIZES))
    assert holds(result["config"], stored["config"]) and result["weights"] == stored["weights"]
    # Some hundred float64 operations on numbers near one, in another order on another processor.
    for now, then in zip(result["logits"], stored["logits"], strict=True):
        assert math.isclose(now, then, rel_tol=1e-9, abs_tol=1e-9)


def test_model_of_a_stored_run_is_read_and_its_checkpoint_refused(tmp_path):
    """Its rows came in another order."""
    with tarfile.open(FOLDER / "run.tar.xz") as stored:
        stored.extractall(tmp_path, filter="data")
    folder = tmp_path / "run"
    assert load(folder / "model")(torch.arange(8)[None]).logits.isfinite().all()
    shutil.rmtree(folder / "model")
    with pytest.raises(InputError, match=r"holds another run \(order is missing there"):
        train(open_data(tmp_path / "data"), folder, mixer="softmax-gla", initializer_range=None)


if __name__ == "__main__":
    write()
