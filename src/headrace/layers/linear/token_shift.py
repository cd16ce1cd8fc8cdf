"""RWKV-6's token shift, which mixes another input for each part of the input projection.

Dimensions: B batch, T tokens, D hidden size, n parts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.modules import is_plain
from ..base import SelfInitialised


class TokenShift(SelfInitialised):
    """RWKV-6's ddlerp (arXiv 2404.05892, section 4.1): five mixes of each token with the previous token, by learned,
    data-dependent weights. `STREAMS` names the inputs that the mixes are for."""

    STREAMS = ("decay", "k", "v", "q", "gate")
    no_weight_decay = ("offset",)

    def __init__(self, hidden_size: int, depth: float, height: float, rank: int = 32):
        super().__init__()
        self.depth, self.height = depth, height  # relative distance from the first and from the last layer, in 0..1
        self.base = nn.Parameter(torch.empty(hidden_size))
        self.offset = nn.Parameter(torch.empty(len(self.STREAMS), hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, len(self.STREAMS) * rank))
        self.up = nn.Parameter(torch.empty(len(self.STREAMS), rank, hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        place = torch.arange(self.base.numel()) / self.base.numel()
        keep = 1 - place**self.height
        half = 1 - place ** (self.height / 2)
        self.base.copy_(keep)
        self.offset.copy_(torch.stack([keep, keep, keep - 0.3 * self.depth, half, half]))
        self.down.zero_()
        self.up.uniform_(-0.01, 0.01)

    def forward(self, x: Tensor, before: Tensor) -> dict[str, Tensor]:
        """Returns a mix [B, T, D] for each stream. before [B, T, D]: the token before each token of x [B, T, D]."""
        change = before - x
        low = torch.tanh((x + change * self.base) @ self.down).unflatten(-1, (len(self.STREAMS), -1))
        weights = self.offset + torch.einsum("btsr,srd->btsd", low, self.up)
        return dict(zip(self.STREAMS, (x[..., None, :] + change[..., None, :] * weights).unbind(-2), strict=True))


def project(linear: nn.Module, streams: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Computes part i of the layer's output from streams[i].

    A module other than an `nn.Linear` without hooks is called on all inputs, which takes n times the work.

    Args:
        streams: n inputs [B, T, D].
        sizes: sizes of the n parts of the output.

    Returns:
        n tensors [B, T, size].
    """
    if is_plain(linear, nn.Linear):
        biases = [None] * len(sizes) if linear.bias is None else linear.bias.split(sizes)
        return [F.linear(*given) for given in zip(streams, linear.weight.split(sizes), biases, strict=True)]
    wholes = linear(torch.stack(streams, -2)).unbind(-2)
    return [whole.split(sizes, -1)[i] for i, whole in enumerate(wholes)]
