"""Griffin's recurrent block (arXiv 2402.19427): a short convolution, the real-gated linear recurrent unit (RG-LRU), and
a branch of GELU that multiplies its output.

Dimensions: B batch, T tokens, E channels (expand · D), H blocks of w channels, N sequences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.base import Mixer
from ..layers.linear.convolution import convolve
from ..ops.call import accumulator
from ..ops.sequences import Sequences
from ..spec.mixer import Facts, Update
from .recurrence import Recurrence
from .registration import register_mixer
from .scan import START, ScanState, elementwise
from .specs.scan import KINDS, ScanKind, ScanSpec


class RGLRU(Mixer):
    """The block of figure 2(c), with the recurrence of section 2.4:

        log a_t = −8 r_t softplus(Λ),    h_t = a_t h_{t−1} + √(1 − a_t²) i_t u_t

    The gates r_t and i_t are sigmoids of block-diagonal projections of u_t with `num_heads` blocks. As in the authors'
    code, the first token of a sequence has the factor 1 in place of √(1 − a_t²)."""

    state_kind = ScanState
    no_weight_decay = ("gate_bias",)
    SPEED = 8.0

    def __init__(self, spec: ScanSpec, *, hidden_size: int, num_heads: int = 1, **unused):
        super().__init__()
        _, E = spec.head_dims(hidden_size, num_heads)
        assert spec.conv is not None
        self.state_shapes = spec.state_shapes(hidden_size, num_heads) | {"tokens": ()}
        self.in_proj = nn.Linear(hidden_size, 2 * E, bias=spec.bias)  # to the recurrence, to the branch of GELU
        self.conv = nn.Conv1d(E, E, spec.conv, groups=E, bias=spec.conv_bias)
        w = E // num_heads
        self.gate_weight = nn.Parameter(torch.empty(2 * num_heads, w, w))  # of i, of r
        self.gate_bias = nn.Parameter(torch.empty(2 * num_heads, w))
        self.rate = nn.Parameter(torch.empty(E))  # Λ
        self.recurrence = Recurrence()
        self.out_proj = nn.Linear(E, hidden_size, bias=spec.bias)
        self.reset_parameters()

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        E, H = len(self.rate), len(self.gate_bias) // 2
        projected, gates = {"u": E, "branch": E}, {"i": H, "r": H}
        return {
            "in_proj.weight": projected, "in_proj.bias": projected, "gate_weight": gates, "gate_bias": gates,
        }  # fmt: skip

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Section 2.4: the initial a at r = 1 is between 0.9 and 0.999. Here its square is uniform, in the paper a; in
        the authors' code its eighth root is in this range, with a uniform square."""
        self.gate_weight.normal_(std=self.gate_weight.shape[-1] ** -0.5)
        self.gate_bias.zero_()
        log_a = self.rate.uniform_(0.9**2, 0.999**2).log() / 2
        self.rate.copy_(torch.expm1(-log_a / self.SPEED).log())

    def run(self, x: Tensor, state: ScanState | None, sequences: Sequences) -> tuple[Tensor, ScanState]:
        u, branch = sequences.tokenwise(self.in_proj, x).chunk(2, -1)
        before = state or START
        u, conv = self.recurrence(convolve, self.conv, u, before.conv, sequences, "torch", False)
        a, b = self._coefficients(u, sequences.positions(before.tokens, x)[..., None] == 0)
        h, memory = elementwise(a, b, before.memory, sequences)
        y = h.to(x.dtype) * F.gelu(branch, approximate="tanh")
        after = ScanState(memory, conv, tokens=sequences.counted(before.tokens, x))
        return sequences.tokenwise(self.out_proj, y), after

    def _coefficients(self, u: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a_t and √(1 − a_t²) i_t u_t, [B, T, E]. first: [B or 1, T, 1], at the first token of a sequence."""
        acc = accumulator(u)
        weight, bias = self.gate_weight.unflatten(0, (2, -1)), self.gate_bias.view(2, -1)
        blocks = u.unflatten(-1, (weight.shape[1], -1))
        logits = torch.einsum("bthi,ghij->gbthj", blocks, weight).flatten(-2) + bias[:, None, None]
        i, r = logits.to(acc).sigmoid()
        log_a = -self.SPEED * r * F.softplus(self.rate.to(acc))
        # The root has no finite derivative at 0.
        room = -torch.expm1(2 * log_a)
        factor = room.clamp(min=torch.finfo(acc).tiny).sqrt().masked_fill(first, 1)
        return log_a.exp(), factor * i * u.to(acc)


KINDS["rg-lru"] = ScanKind(
    Facts(
        "headrace.extra.rg_lru.RGLRU",
        Update("a", "√(1 − a²) i u", "a, per channel"),
        flops=6,  # a h + √(1 − a²) (i u): 2 + 2; 1 − a²: 2
    ),
    ("conv", "expand", "conv_bias", "bias"),
)
register_mixer(
    "rg-lru",
    # RecurrentGemma 2B: as many channels as the hidden size; Griffin: 4/3 as many, with 16 blocks
    ScanSpec("rg-lru", conv=4, bias=True),
    about="A gated linear recurrence per channel, whose inputs are scaled to keep the memory's variance.",
    paper="https://arxiv.org/abs/2402.19427",
)
