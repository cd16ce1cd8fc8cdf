"""Parts of softmax attention as arXiv 2507.23632 takes it apart, for linear mixers: a gate of v, and divisions by the
number of tokens or by the sum of weights as a constant.

Dimensions: B batch, T tokens, H heads, V value dimension per head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.linear.readout import GateLogits
from ..layers.linear.stage import STAGES, Stage, Tokens
from ..ops.call import accumulator


def divided_by_length(v: Tensor, length: Tensor, power: Tensor) -> Tensor:
    """Returns v / n^σ(c): v [B, T, H, V], the numbers of tokens n in length [B or 1, T], c in power [H]."""
    wide = length[..., None, None].to(accumulator(v)) ** torch.sigmoid(power)[:, None]
    return (v / wide).to(v.dtype)


def seen(mixer: Any, t: Tokens) -> Tensor:
    """Returns the number of tokens that each token sees, [B or 1, T]."""
    return t.positions + 1 if mixer.causal else t.sequences.totals(t.x)


class ValueGate(Stage):
    """A sigmoid gate of v, one number per head, with a bias (arXiv 2507.23632, appendix E)."""

    def build(self, mixer: Any) -> None:
        mixer.value_gate = GateLogits("sigmoid-head", mixer.H, mixer.V)
        mixer.parts["value_gate"] = mixer.value_gate.in_features

    def __call__(self, mixer: Any, t: Tokens) -> None:
        gate = torch.sigmoid(t.sequences.tokenwise(mixer.value_gate, t.parts["value_gate"]))
        t.v = t.v * gate.to(t.v.dtype)  # under autocast the bias makes it float32


class OverLength(Stage):
    """v / n^σ(c), with the number n of tokens that the token sees and a parameter c per head."""

    def build(self, mixer: Any) -> None:
        mixer.power = nn.Parameter(torch.empty(mixer.H))

    def reset(self, mixer: Any) -> None:
        mixer.power.fill_(0.5)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.v = divided_by_length(t.v, seen(mixer, t), mixer.power)


class DivideDetached(Stage):
    """Divides what is read by the sum of weights, at least 1, without a gradient."""

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.out = t.out[..., :-1] / t.out[..., -1:].clamp(min=1).detach()


class DivideByLength(Stage):
    """Divides what is read by the number of tokens that the token sees."""

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.out = t.out.to(accumulator(t.out)) / seen(mixer, t)[..., None, None]


STAGES.update({
    "value-gate": ValueGate, "over-length": OverLength, "divide-detached": DivideDetached,
    "divide-by-length": DivideByLength,
})  # fmt: skip
