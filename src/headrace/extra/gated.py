"""Gated elementwise recurrences h_t = a_t h_{t−1} + b_t whose a and b are functions of the token alone: minGRU and
minLSTM (arXiv 2410.01201), and HGRN (arXiv 2311.04823).

Dimensions: B batch, T tokens, D hidden size, E channels (expand · D), N sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.base import Mixer
from ..ops.call import accumulator
from ..ops.sequences import Sequences
from ..spec.mixer import Facts, Update
from .registration import register_mixer
from .scan import START, ScanState, elementwise
from .specs.scan import KINDS, ScanKind, ScanSpec


def min_gru(z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a = 1 − σ(z) and b = σ(z) h."""
    return torch.sigmoid(-z), torch.sigmoid(z) * h


def min_lstm(f: Tensor, i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a = σ(f) / (σ(f) + σ(i)) and b = (1 − a) h. The logit of 1 − a is log σ(i) − log σ(f), which is finite
    where both gates underflow."""
    return min_gru(F.logsigmoid(i) - F.logsigmoid(f), h)


def hgrn(f: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a = σ(f) and b = (1 − a) SiLU(c), to which the layer applies its lower bound."""
    return min_gru(-f, F.silu(c))


class Form(NamedTuple):
    """What differs between the kinds."""

    parts: tuple[str, ...]  # projections of the token
    coefficients: Callable[..., tuple[Tensor, Tensor]]  # a and b as a function of these, but for the output's gate
    update: Update
    flops: int


FORMS = {
    # 1 − z: 1; z h̃: 1; a h + b: 2
    "mingru": Form(("z", "h"), min_gru, Update("1 − z", "z h̃", "1 − z, per channel"), 4),
    # f + i and two ratios: 3; times h̃: 1; a h + b: 2
    "minlstm": Form(("f", "i", "h"), min_lstm, Update("f / (f + i)", "i h̃ / (f + i)", "f / (f + i), per channel"), 6),
    # γ + (1 − γ) σ(f): 2; (1 − α) c: 2; α h + b: 2
    "hgrn": Form(("f", "c", "gate"), hgrn, Update("α", "(1 − α) c", "α, per channel"), 6),
}
for _kind, _form in FORMS.items():
    _facts = Facts("headrace.extra.gated.GatedScan", _form.update, _form.flops)
    KINDS[_kind] = ScanKind(_facts, ("expand", "bias"), gated="gate" in _form.parts)


class GatedScan(Mixer):
    """The recurrence between two projections: W_out h, or W_out (RMSNorm(h) ⊙ SiLU(gate)) in HGRN.

    HGRN's decay has a lower bound γ per channel: a = γ + (1 − γ) σ(f). It is a parameter of the layer, which begins as
    k/L in layer k of L, the paper's initial bound; in the paper the bounds of all layers are partial sums of one
    softmax, so that they grow with depth. The recurrence is the real one of the authors' later work (arXiv 2404.07904),
    without the rotation e^{iθ} of the state."""

    state_kind = ScanState
    floor: Any  # γ [E]
    norm_weight: Any

    def __init__(
        self, spec: ScanSpec, *, hidden_size: int, layer_idx: int = 0, num_layers: int = 1, norm_eps: float = 1e-6,
        **unused,
    ):  # fmt: skip
        super().__init__()
        self.E = spec.head_dims(hidden_size, 1)[1]
        self.state_shapes = spec.state_shapes(hidden_size, 1)
        self.parts, self.coefficients, *_ = FORMS[spec.kind]
        self.place, self.norm_eps = layer_idx / num_layers, norm_eps
        self.in_proj = nn.Linear(hidden_size, len(self.parts) * self.E, bias=spec.bias)
        gated = "gate" in self.parts
        self.floor = nn.Parameter(torch.empty(self.E)) if gated else None
        self.norm_weight = nn.Parameter(torch.empty(self.E)) if gated else None
        self.out_proj = nn.Linear(self.E, hidden_size, bias=spec.bias)
        self.reset_parameters()

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        parts = dict.fromkeys(self.parts, self.E)
        return {"in_proj.weight": parts, "in_proj.bias": parts}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.floor is not None:
            self.floor.fill_(self.place)
            self.norm_weight.fill_(1)

    def run(self, x: Tensor, state: ScanState | None, sequences: Sequences) -> tuple[Tensor, ScanState]:
        acc = accumulator(x)
        parts = dict(zip(self.parts, sequences.tokenwise(self.in_proj, x).to(acc).split(self.E, -1), strict=True))
        gate = parts.pop("gate", None)
        a, b = self.coefficients(*parts.values())
        if self.floor is not None:
            floor = self.floor.to(acc).clamp(0, 1)
            a, b = floor + (1 - floor) * a, (1 - floor) * b
        h, memory = elementwise(a, b, (state or START).memory, sequences)
        if gate is not None:
            h = F.rms_norm(h, (self.E,), self.norm_weight.to(acc), self.norm_eps) * F.silu(gate)
        return sequences.tokenwise(self.out_proj, h.to(x.dtype)), ScanState(memory)


register_mixer(
    "mingru",
    ScanSpec("mingru", bias=True),
    about="A GRU whose gate and candidate depend on the token alone, so that it runs as a scan.",
    paper="https://arxiv.org/abs/2410.01201",
)
register_mixer(
    "minlstm",
    ScanSpec("minlstm", bias=True),
    about="An LSTM whose gates depend on the token alone and are normalized to sum 1.",
    paper="https://arxiv.org/abs/2410.01201",
)
register_mixer(
    "hgrn",
    ScanSpec("hgrn"),
    about="A gated recurrence per channel whose forget gate has a lower bound that grows with depth.",
    paper="https://arxiv.org/abs/2311.04823",
)
