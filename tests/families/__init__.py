"""The model families of transformers that headrace converts, and configurations of them to test."""

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.torch_version import TorchVersion
from transformers import AutoModelForCausalLM
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from headrace.convert import FORMATS
from headrace.verification.verify import relative as relative

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": None}
GROUPED = {"mamba2", "bamba", "granitemoehybrid"}  # whose norm at the output of Mamba-2 is of a group of heads


@dataclass(frozen=True)
class Family:
    """A model_type.

    base: the fields of a small model.
    variants: name -> fields that differ from the base.
    fields: field -> values to try, or dicts of fields where several must change together, for fields whose value does
        not show what another one is.
    """

    base: dict[str, Any]
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    fields: dict[str, list[Any]] = field(default_factory=dict)


@contextmanager
def float64_throughout():
    """What a foreign model computes in float32 whatever it is given, it computes in float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    wide = mock.patch.multiple(torch, float32=torch.float64, float=torch.float64)
    scan = RecurrentGemmaRglru._rnn_scan  # whose float32 is the default of an argument, set on import
    defaults = tuple(torch.float64 if value is torch.float32 else value for value in scan.__defaults__ or ())
    try:
        double = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
        with wide, double, mock.patch.object(scan, "__defaults__", defaults):
            yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def save(config, path):
    """Writes a model with random weights, and returns it."""
    with float64_throughout():
        theirs = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
        for name, value in theirs.state_dict().items():
            if FORMATS[config.model_type].holds(name):
                torch.nn.init.normal_(value, std=0.3)
        theirs.save_pretrained(path)
    return comparable(theirs)


def rewrite(path, without=(), **settings):
    """Changes the config.json of a folder, and returns the folder."""
    config = json.loads((path / "config.json").read_text("utf-8")) | settings
    kept = {name: value for name, value in config.items() if name not in without}
    (path / "config.json").write_text(json.dumps(kept))
    return path


def read(path):
    with float64_throughout():
        return comparable(AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval())


def comparable(theirs):
    theirs.config.return_dict = True
    if hasattr(theirs.config, "output_router_logits"):
        theirs.config.output_router_logits = False
    groups = getattr(theirs.config, {"mamba2": "n_groups"}.get(theirs.config.model_type, "mamba_n_groups"), 1)
    if theirs.config.model_type in GROUPED and groups > 1 and TorchVersion(transformers.__version__) < "5.23":
        pytest.skip("transformers before 5.23 normalizes all groups of Mamba-2 together")
    return theirs


def logits(theirs, ids):
    with float64_throughout():
        return theirs(ids, use_cache=False).logits
