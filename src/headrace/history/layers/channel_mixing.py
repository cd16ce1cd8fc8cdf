"""RWKV-4's channel mixing, the MLP of its blocks, which also reads the previous token.

Dimensions: B batch, T tokens, D hidden size, N sequences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.base import Mixer, ShiftState
from ...ops.sequences import Sequences


class ChannelMixing(Mixer):
    """σ(W_gate x_r) ⊙ W_down relu(W_up x_k)², where x_r and x_k are mixes of each token with the one before it, by a
    learned weight per channel (arXiv 2305.13048, section 3.1.2)."""

    state_kind = ShiftState
    static_shapes = True
    no_weight_decay = ("mix",)

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.hidden_size, self.state_shapes = hidden_size, {"shift": (1, hidden_size)}
        self.mix = nn.Parameter(torch.empty(2, hidden_size))  # weights of the current token in x_r and x_k
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        return {"mix": {"r": 1, "k": 1}}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.mix.copy_(torch.arange(self.mix.shape[1]) / self.mix.shape[1])

    def run(self, x: Tensor, state: ShiftState | None, sequences: Sequences) -> tuple[Tensor, ShiftState]:
        before, shift = sequences.shift(x, None if state is None else state.shift)
        r, k = (before[..., None, :] + (x - before)[..., None, :] * self.mix).unbind(-2)
        hidden = F.relu(sequences.tokenwise(self.up_proj, k)).square()
        gate = torch.sigmoid(sequences.tokenwise(self.gate_proj, r))
        return gate * sequences.tokenwise(self.down_proj, hidden), ShiftState(shift)
