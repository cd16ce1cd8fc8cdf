"""RWKV's token shifts, which mix another input for each part of the input projection.

Dimensions: B batch, T tokens, D hidden size, n parts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..base import SelfInitialized
from .stage import Stage, Tokens


def mixed(x: Tensor, before: Tensor, weights: Tensor, streams: tuple[str, ...]) -> dict[str, Tensor]:
    """Returns x + weights (before − x) [B, T, D] for each stream. weights: [streams, D] or [B, T, streams, D]."""
    mixes = x[..., None, :] + (before - x)[..., None, :] * weights
    return dict(zip(streams, mixes.unbind(-2), strict=True))


def first_weights(streams: tuple[str, ...], hidden_size: int, depth: float, height: float) -> Tensor:
    """Returns the initial weights of the previous token [streams, D]: higher in low channels and in lower layers."""
    place = torch.arange(hidden_size) / hidden_size
    keep, half = 1 - place**height, 1 - place ** (height / 2)
    weights = {"decay": keep, "k": keep, "v": keep - 0.3 * depth, "q": half, "gate": half}
    return torch.stack([weights[name] for name in streams])


class StaticShift(SelfInitialized):
    """RWKV-5's token shift (arXiv 2404.05892, section 4.1.1): a mix of each token with the previous token for each part
    of the input projection, by a learned weight per channel."""

    STREAMS: tuple[str, ...] = ("k", "v", "q", "gate")
    no_weight_decay = ("offset",)

    def __init__(self, hidden_size: int, depth: float, height: float, rank: int = 32):
        super().__init__()
        self.depth, self.height = depth, height  # relative distance from the first and from the last layer, in 0..1
        self.build(hidden_size, rank)
        self.reset_parameters()

    def build(self, hidden_size: int, rank: int) -> None:
        self.offset = nn.Parameter(torch.empty(len(self.STREAMS), hidden_size))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.offset.copy_(first_weights(self.STREAMS, self.offset.shape[1], self.depth, self.height))

    def forward(self, x: Tensor, before: Tensor) -> dict[str, Tensor]:
        """Returns a mix [B, T, D] for each stream. before [B, T, D]: the token before each token of x [B, T, D]."""
        return mixed(x, before, self.offset, self.STREAMS)


class TokenShift(StaticShift):
    """RWKV-6's ddlerp (arXiv 2404.05892, section 4.2.1): five mixes of each token with the previous token, by learned,
    data-dependent weights. `STREAMS` names the inputs that the mixes are for."""

    STREAMS = ("decay", "k", "v", "q", "gate")

    def build(self, hidden_size: int, rank: int) -> None:
        self.base = nn.Parameter(torch.empty(hidden_size))
        self.offset = nn.Parameter(torch.empty(len(self.STREAMS), hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, len(self.STREAMS) * rank))
        self.up = nn.Parameter(torch.empty(len(self.STREAMS), rank, hidden_size))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.base.copy_(self.offset[0])
        self.down.zero_()
        self.up.uniform_(-0.01, 0.01)

    def forward(self, x: Tensor, before: Tensor) -> dict[str, Tensor]:
        """Returns a mix [B, T, D] for each stream. before [B, T, D]: the token before each token of x [B, T, D]."""
        change = before - x
        low = torch.tanh((x + change * self.base) @ self.down).unflatten(-1, (len(self.STREAMS), -1))
        weights = self.offset + torch.einsum("btsr,srd->btsd", low, self.up)
        return mixed(x, before, weights, self.STREAMS)


SHIFTS = {"lerp": StaticShift, "ddlerp": TokenShift}


class Shift(Stage):
    """The input of each part of the projection: a mix of each token with the one before."""

    field = "inputs.shift"
    kinds = ()  # an operation of its own (token.py)

    def build(self, mixer: Any) -> None:
        mixer.shift = SHIFTS[mixer.spec.inputs.shift](mixer.hidden_size, mixer.depth, mixer.height)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        before, t.next["shift"] = t.sequences.shift(t.x, t.before("shift"))
        t.streams = mixer.shift(t.x, before)
