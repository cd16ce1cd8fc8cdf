"""Gates and divisors of v.

Dimensions: B batch, T tokens, H heads, V value dimension per head.
"""

from typing import Any

import torch
from torch import nn

from .features import divided_by_length
from .readout import GateLogits
from .stage import Stage, Tokens


class ValueGate(Stage):
    """A sigmoid gate of v, one number per head, with a bias (arXiv 2507.23632, appendix E)."""

    field = "inputs.value_gate"

    def build(self, mixer: Any) -> None:
        mixer.value_gate = GateLogits("sigmoid-head", mixer.H, mixer.V)
        mixer.parts["value_gate"] = mixer.value_gate.in_features

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.v = t.v * torch.sigmoid(t.sequences.tokenwise(mixer.value_gate, t.parts["value_gate"]))


class OverLength(Stage):
    """v / n^σ(c), with the number n of tokens so far and a parameter c per head."""

    field = "inputs.by_length"

    def build(self, mixer: Any) -> None:
        mixer.power = nn.Parameter(torch.empty(mixer.H))

    def reset(self, mixer: Any) -> None:
        mixer.power.fill_(0.5)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.v = divided_by_length(t.v, t.positions + 1, mixer.power)
