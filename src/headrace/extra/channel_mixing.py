"""Channel mixing, the MLP of RWKV's blocks, which also reads the previous token.

Dimensions: B batch, T tokens, D hidden size, N sequences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.base import Mixer, ShiftState
from ..ops.sequences import Sequences
from ..spec.stack import MLPS
from .rwkv import mixed


class ChannelMixing(Mixer):
    """W_down relu(W_up x_k)², where x_k is a mix of each token with the one before it, by a learned weight per channel
    (RWKV-7, arXiv 2503.14456). The weight of the token in channel i begins as i / D in every layer, as in the first of
    the author's code, which gives it more in deeper ones."""

    state_kind = ShiftState
    static_shapes = True
    no_weight_decay = ("mix",)
    STREAMS: tuple[str, ...] = ("k",)

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.hidden_size, self.state_shapes = hidden_size, {"shift": (1, hidden_size)}
        self.mix = nn.Parameter(torch.empty(len(self.STREAMS), hidden_size))  # weights of the current token
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        return {"mix": dict.fromkeys(self.STREAMS, 1)}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.mix.copy_(torch.arange(self.mix.shape[1]) / self.mix.shape[1])

    def run(self, x: Tensor, state: ShiftState | None, sequences: Sequences) -> tuple[Tensor, ShiftState]:
        before, shift = sequences.shift(x, None if state is None else state.shift)
        return self.mixed(mixed(before, x, self.mix, self.STREAMS), sequences), ShiftState(shift)

    def mixed(self, x: dict[str, Tensor], sequences: Sequences) -> Tensor:
        hidden = F.relu(sequences.tokenwise(self.up_proj, x["k"])).square()
        return sequences.tokenwise(self.down_proj, hidden)


class GatedChannelMixing(ChannelMixing):
    """σ(W_gate x_r) ⊙ W_down relu(W_up x_k)², where x_r is another such mix (RWKV-4, arXiv 2305.13048, section
    3.1.3)."""

    STREAMS = ("r", "k")

    def __init__(self, hidden_size: int, width: int):
        super().__init__(hidden_size, width)
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def mixed(self, x: dict[str, Tensor], sequences: Sequences) -> Tensor:
        return torch.sigmoid(sequences.tokenwise(self.gate_proj, x["r"])) * super().mixed(x, sequences)


MLPS.update({"rwkv4": f"{__name__}.GatedChannelMixing", "rwkv7": f"{__name__}.ChannelMixing"})
