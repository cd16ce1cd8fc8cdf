"""The model families of transformers that headrace converts, and configurations of them to test."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": None}


@dataclass(frozen=True)
class Family:
    """A model_type.

    base: the fields of a small model.
    variants: name -> fields that differ from the base.
    fields: field -> values to try, or dicts of fields where several must change together, for fields whose value does
        not show what another one is.
    real: the fields of a released model, for shapes, with the fewest layers that have one of each kind.
    """

    base: dict[str, Any]
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    fields: dict[str, list[Any]] = field(default_factory=dict)
    real: dict[str, Any] = field(default_factory=dict)


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
