"""What RWKV-5 and RWKV-6 (arXiv 2404.05892) add to a linear mixer: a token shift, which mixes another input for each
part of the input projection, their decays, and a bonus for the current token.

Dimensions: B batch, T tokens, D hidden size, H heads, K key dimension per head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.base import SelfInitialized
from ..layers.linear.decays import DECAYS, DecayModule, biased, finite_exp
from ..layers.linear.stage import STAGES, Stage, Tokens
from ..layers.linear.token import add_linear
from ..ops.backends.native.program import NAMES, Program, UnsupportedError
from ..ops.call import accumulator


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
        change = before - x
        low = torch.tanh((x + change * self.base) @ self.down).unflatten(-1, (len(self.STREAMS), -1))
        weights = self.offset + torch.einsum("btsr,srd->btsd", low, self.up)
        return mixed(x, before, weights, self.STREAMS)

    def add_projections(self, program: Program, mixer: Any, x: int, projected: int, place: int) -> None:
        """Adds the shift and the projection of each of its streams to the token's program, as `add_mixer`."""
        D, streams, rank = mixer.hidden_size, self.STREAMS, self.up.shape[1]
        state = program.state(place, "shift", (1, D))
        mixed = program.columns(D)
        low, more = program.columns(len(streams) * rank), program.columns(D)
        names = "base", "offset", "down", "up"
        weight = {name: program.weight(self, name, getattr(self, name).shape) for name in names}
        program.add("mix", x=x, out=mixed, inputs=D, weight=weight["base"], state=state)
        program.add("transposed", x=mixed, out=low, inputs=D, outputs=len(streams) * rank, weight=weight["down"])
        program.add("activate", x=low, out=low, inputs=len(streams) * rank, what=NAMES["activation"].index("tanh"))
        first = 0
        for part, size in mixer.parts.items():
            source = x
            if part in streams:
                i, source = streams.index(part), mixed
                at = low + i * rank
                program.add("transposed", x=at, out=more, inputs=rank, outputs=D, weight=weight["up"], first=i)
                program.add("mix", x=x, out=mixed, inputs=D, other=more, weight=weight["offset"], first=i, state=state)
            add_linear(program, mixer, "in_proj", source, projected + first, rows=(first, size))
            first += size
        program.add("store", x=x, inputs=D, state=state)


SHIFTS = {"lerp": StaticShift, "ddlerp": TokenShift}


class Shift(Stage):
    """The input of each part of the projection: a mix of each token with the one before."""

    def build(self, mixer: Any) -> None:
        mixer.shift = SHIFTS[mixer.spec.inputs.shift](mixer.hidden_size, mixer.depth, mixer.height)

    def native(self, mixer: Any) -> dict[str, Any]:
        if (kind := mixer.spec.inputs.shift) != "ddlerp":
            raise UnsupportedError(f"it does not support inputs.shift={kind!r}")
        return {}  # operations of its own (`add_projections`)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        before, t.next["shift"] = t.sequences.shift(t.x, t.before("shift"))
        t.streams = mixer.shift(t.x, before)


class Bonus(Stage):
    """The parameter u of the recurrence, with RWKV's initialization."""

    kinds = ()

    def build(self, mixer: Any) -> None:
        mixer.bonus = nn.Parameter(torch.empty(mixer.H, mixer.spec.memory_rows(mixer.K)))

    def reset(self, mixer: Any) -> None:
        n = mixer.bonus.numel()
        i = torch.arange(n)
        zigzag = 0.1 * ((i + 1) % 3 - 1)
        mixer.bonus.copy_((mixer.depth * (1 - i / max(n - 1, 1)) + zigzag).view_as(mixer.bonus))

    def __call__(self, mixer: Any, t: Tokens) -> None:
        """The recurrence reads the parameter."""


@torch.no_grad()
def rise_(bias: Tensor, depth: float) -> None:
    """RWKV's initialization of the logarithms of decay rates: from −6 to −1 over channels, later in deeper layers."""
    n = bias.numel()
    place = torch.arange(n) / max(n - 1, 1)
    bias.copy_(-6 + 5 * place ** (0.7 + 1.3 * depth))


class ExpFixedDecay(DecayModule):
    """RWKV-5's decay: log_decay [B, T, H, K] = −exp(b), of all tokens (arXiv 2404.05892, section 4.1.2)."""

    kind = "exp-fixed"

    def build(self) -> None:
        self.bias = nn.Parameter(torch.empty(self.num_heads * self.key_dim))

    def reset_parameters(self) -> None:
        rise_(self.bias, self.depth)

    def forward(self, x: Tensor) -> Tensor:
        return self._heads(-finite_exp(self.bias.to(accumulator(x)))).expand(*x.shape[:2], -1, -1)


class ExpDecay(DecayModule):
    """RWKV-6's decay: log_decay [B, T, H, K] = −exp(b + tanh(x) W) (arXiv 2404.05892, section 4.2.2)."""

    kind = "exp"
    starts_fixed = True

    def build(self) -> None:
        self.in_features = self.spec.projected(self.num_heads, self.key_dim)
        self.bias = nn.Parameter(torch.empty(self.num_heads * self.key_dim))
        self.up = nn.Parameter(torch.empty(self.in_features, self.num_heads * self.key_dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        rise_(self.bias, self.depth)
        self.up.uniform_(-0.01, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return -finite_exp(biased(self._heads(torch.tanh(x) @ self.up), self.bias))


STAGES.update({"shift": Shift, "bonus": Bonus})
DECAYS.update({decay.kind: decay for decay in (ExpFixedDecay, ExpDecay)})
