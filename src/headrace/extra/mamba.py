"""Mamba-1 (arXiv 2312.00752). Its decay differs for every channel and state number, which `linear_attention` does not
have.

Dimensions: B batch, T tokens, D hidden size, E channels (expand · D), S state numbers per channel, N sequences.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.base import Mixer
from ..layers.linear.convolution import convolve
from ..layers.linear.decays import draw_step_bias_, finite_exp
from ..ops.call import accumulator
from ..ops.sequences import Sequences
from ..spec.attention import AttentionSpec
from ..spec.mixer import Facts, Update
from ..spec.stack import BlockStyle, Decoder, Experts, Layer
from . import native_scan as native
from .recurrence import Recurrence
from .registration import register_mixer, register_model
from .scan import START, ScanState
from .selective_scan import Operands, selective_scan, selective_step
from .specs.scan import KINDS, ScanKind, ScanSpec


class Mamba(Mixer):
    """The block of figure 3: projection, short convolution, selective scan, gate, projection."""

    state_kind = ScanState
    no_weight_decay = ("A_log",)

    def __init__(self, spec: ScanSpec, *, hidden_size: int, num_heads: int = 1, norm_eps: float = 1e-6, **place):
        super().__init__()
        S, E = spec.head_dims(hidden_size, num_heads)
        rank = spec.rank or -(-hidden_size // 16)
        self.state_shapes = spec.state_shapes(hidden_size, num_heads)
        assert spec.conv is not None
        self.split, self.normalizes, self.norm_eps = [rank, S, S], bool(spec.norm), spec.eps or norm_eps
        self.in_proj = nn.Linear(hidden_size, 2 * E, bias=spec.bias)
        self.conv = nn.Conv1d(E, E, spec.conv, groups=E, bias=spec.conv_bias)
        self.x_proj = nn.Linear(E, rank + 2 * S, bias=False)
        self.dt_weight = nn.Parameter(torch.empty(E, rank))
        self.dt_bias = nn.Parameter(torch.empty(E))
        self.A_log = nn.Parameter(torch.empty(S, E))
        self.skip = nn.Parameter(torch.empty(E))
        self.norm_weight = nn.Parameter(torch.empty(sum(self.split))) if spec.norm is True else None
        self.recurrence = Recurrence()
        self.out_proj = nn.Linear(E, hidden_size, bias=spec.bias)
        self.reset_parameters()

    @property
    def static_shapes(self) -> bool:
        """Where the native scan runs, which reads the lengths itself."""
        return native.unsupported_reason(self.A_log.to(accumulator(self.A_log)), self.A_log) is None

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        return {"norm_weight": dict(zip(("dt", "B", "C"), self.split, strict=True))}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Section 3.6: A is −1, −2, …, −S in every channel; step sizes are between 0.001 and 0.1."""
        bound = self.dt_weight.shape[1] ** -0.5
        self.dt_weight.uniform_(-bound, bound)
        draw_step_bias_(self.dt_bias)
        self.A_log.copy_(torch.arange(1, len(self.A_log) + 1).log()[:, None].expand_as(self.A_log))
        self.skip.fill_(1)
        if self.norm_weight is not None:
            self.norm_weight.fill_(1)

    def run(self, x: Tensor, state: ScanState | None, sequences: Sequences) -> tuple[Tensor, ScanState]:
        u, z = sequences.tokenwise(self.in_proj, x).chunk(2, -1)
        before = state or START
        u, conv = convolve(self.conv, u, before.conv, sequences)
        operands = self._operands(u, before.memory, sequences)
        if x.shape[1] == 1 and not sequences.packed:
            out, memory = self.recurrence(selective_step, operands)
        else:
            out, memory = self.recurrence(selective_scan, operands, sequences)
        y = (out.view_as(u) + self.skip * u).to(x.dtype) * F.silu(z)
        return sequences.tokenwise(self.out_proj, y), ScanState(memory, conv)

    def _operands(self, u: Tensor, memory: Tensor | None, sequences: Sequences) -> Operands:
        """Returns the operands of the scan for u [B, T, E], as packed sequences."""
        acc, flat = accumulator(u), u.flatten(0, 1).contiguous()  # the convolution's output may have time last
        projected = sequences.tokenwise(self.x_proj, flat.view_as(u)).flatten(0, 1)
        dt, B, C = self._normalized(projected.split(self.split, -1))
        dt = F.softplus(F.linear(dt, self.dt_weight).to(acc) + self.dt_bias.to(acc))
        A = -finite_exp(self.A_log.to(acc))
        memory = A.new_zeros(sequences.count, *A.shape) if memory is None else memory
        return Operands(flat.to(acc), dt, A, B.to(acc), C.to(acc), memory)

    def _normalized(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self.normalizes:
            return parts
        weights = [None] * len(parts) if self.norm_weight is None else self.norm_weight.split(self.split)
        return [F.rms_norm(x, x.shape[-1:], w, self.norm_eps) for x, w in zip(parts, weights, strict=True)]


KINDS["mamba"] = ScanKind(
    Facts(
        "headrace.extra.mamba.Mamba",
        Update("e^(A dt)", "dt u", "e^(A dt), per number"),
        flops=6,  # dt A: 1; e^(dt A) h + (dt u) B: 3; C h: 2
    ),
    ("state_size", "conv", "expand", "rank", "norm", "eps", "conv_bias", "bias"),
)
MAMBA = ScanSpec("mamba", state_size=16, conv=4, expand=2.0)
register_mixer(
    "mamba",
    MAMBA,
    about="A diagonal state-space model whose step size, B and C are computed from the token.",
    paper="https://arxiv.org/abs/2312.00752",
)
register_model(
    "jamba",
    Decoder(
        tuple(
            Layer(
                AttentionSpec(kv_heads=2, rotary=False) if i == 4 else replace(MAMBA, norm=True),
                "experts" if i % 2 else "one",
            )
            for i in range(8)
        ),
        BlockStyle(experts=Experts()),
    ),
    about="Mamba layers, with attention in one layer of eight and a mixture of experts in every second.",
    paper="https://arxiv.org/abs/2403.19887",
)
register_model(
    "zamba",
    Decoder(
        tuple(Layer(MAMBA, "none", shared=i == 2) for i in range(6)),
        BlockStyle(mlp="geglu", shared=AttentionSpec(rotary=False, scale="half-key")),
    ),
    about="Mamba layers and one attention block that every sixth layer shares.",
    paper="https://arxiv.org/abs/2405.16712",
)
