"""RWKV-7 (arXiv 2503.14456): the delta rule with a decay per key channel and with separate keys for the read (κ), the
erasure (a ⊙ κ) and the write (k) of an update; and the value residual, a mix of the values of each layer with those of
the first. A layer outside a model, in an encoder or as a parallel mixer mixes its values with themselves.

Dimensions: B batch, T tokens, D hidden size, H heads, K dimension per head of keys and values, N sequences, M chunks, C
tokens per chunk.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.base import Carried, SelfInitialized
from ..layers.linear.readout import GROUP_NORM_EPS
from ..layers.linear.token import MixerState
from ..layers.maps import mixed
from ..ops.call import accumulator
from ..ops.checks import require
from ..ops.sequences import Sequences
from ..spec.mixer import Facts, Update
from . import dplr
from .chunks import CHUNK, MatrixMixer, recur
from .dplr import Operands, step
from .registration import register_mixer
from .specs.matrix import KINDS, MatrixKind, MatrixSpec

# Of low-rank projections over the root of the hidden size, in the author's code.
RANKS = {"rank": 2.5, "rate_rank": 2.5, "value_rank": 1.7, "gate_rank": 5.0}
FASTEST = math.exp(-0.5)  # upper bound of −log_decay: the memory decays by at most e^−0.61 per token


def form(counts: list[int], S: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `dplr.form`: half a chunk decays by at most e^(CHUNK / 2 · FASTEST) < e^10."""
    return dplr.form(counts, S, *operands, base=CHUNK)


class LowRank(SelfInitialized):
    """up(inner(down(x))). The initial output is constant, and zero if inner(0) = 0."""

    def __init__(self, hidden_size: int, rank: int, inner: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.empty(hidden_size, rank))
        self.up = nn.Parameter(torch.empty(rank, hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.down.zero_()
        rank, width = self.up.shape
        drawn = torch.empty_like(self.up, dtype=accumulator(self.up))  # there is no decomposition in 16 bits
        self.up.copy_(nn.init.orthogonal_(drawn, 0.1 * max(rank / width, 1) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.down) @ self.up


class RWKV7(MatrixMixer):
    """RWKV-7's time mixing: token shift, projections, the recurrence, norm per head, bonus, gate, projection."""

    carries = True
    no_weight_decay = ("mix",)
    STREAMS = ("q", "decay", "k", "v", "rate", "gate")

    def __init__(
        self, spec: MatrixSpec, *, hidden_size: int, num_heads: int, layer_idx: int = 0, num_layers: int = 1, **unused
    ):
        super().__init__(spec, hidden_size, num_heads)
        D, self.layer_idx, self.eps = hidden_size, layer_idx, spec.eps or GROUP_NORM_EPS
        self.depth, self.height = layer_idx / max(num_layers - 1, 1), 1 - layer_idx / num_layers
        self.share = (layer_idx + 1) / num_layers  # fraction of the layers up to and including this one
        self.mix = nn.Parameter(torch.empty(len(self.STREAMS), D))  # weights of the previous token in each stream
        self.q_proj = nn.Linear(D, D, bias=False)
        self.k_proj = nn.Linear(D, D, bias=False)
        self.v_proj = nn.Linear(D, D, bias=False)
        self.o_proj = nn.Linear(D, D, bias=False)
        usual = {name: max(32, 32 * round(factor * math.sqrt(D) / 32)) for name, factor in RANKS.items()}
        ranks = {name: getattr(spec, name) or spec.rank or rank for name, rank in usual.items()}
        self.decay = LowRank(D, ranks["rank"], torch.tanh)
        self.rate = LowRank(D, ranks["rate_rank"], nn.Identity())
        self.gate = LowRank(D, ranks["gate_rank"], torch.sigmoid)
        self.value = LowRank(D, ranks["value_rank"], nn.Identity()) if layer_idx else None
        self.value_bias = nn.Parameter(torch.empty(D)) if layer_idx else None
        self.decay_bias = nn.Parameter(torch.empty(D))
        self.rate_bias = nn.Parameter(torch.empty(D))
        self.k_read = nn.Parameter(torch.empty(D))
        self.k_rate = nn.Parameter(torch.empty(D))
        self.bonus = nn.Parameter(torch.empty(D))
        self.norm_weight = nn.Parameter(torch.empty(D))
        self.norm_bias = nn.Parameter(torch.empty(D))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initialization of the author's code, but for the projections, which begin as those of other layers."""
        D = self.bonus.numel()
        i = torch.arange(D)
        place, powers = i / max(D - 1, 1), torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])
        within = 2 * (i % self.K) / max(self.K - 1, 1) - 1
        zigzag = within * within.abs()
        self.mix.copy_(1 - (i / D) ** (powers * self.height)[:, None])
        self.decay_bias.copy_(-5.5 + 6 * place ** (1 + self.depth**0.3) + 2.5 * zigzag)
        self.rate_bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * (place - 0.5))
        if self.value_bias is not None:
            self.value_bias.copy_(0.73 - 0.4 * (place - 0.5))
        self.k_read.copy_(0.71 - 0.1 * (place - 0.5))
        self.k_rate.fill_(1.02)
        self.bonus.fill_(-0.04)
        self.norm_weight.fill_(self.share**0.7)
        self.norm_bias.zero_()

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        return {"mix": dict.fromkeys(self.STREAMS, 1)}

    def run(
        self, x: Tensor, state: MixerState | None, sequences: Sequences, carried: Carried | None = None
    ) -> tuple[Tensor, MixerState]:
        acc = accumulator(x)
        before, shift = sequences.shift(x, None if state is None else state.shift)
        change = before - x
        streams = {name: torch.addcmul(x, change, mix) for name, mix in zip(self.STREAMS, self.mix, strict=True)}
        operands = self.operands(streams, acc, sequences, carried or Carried())
        past = None if state is None else state.memory

        def mix(v: Tensor) -> tuple[Tensor, Tensor]:
            return self.recurrence(recur, step, form, operands._replace(v=v), sequences, past)

        out, memory = mixed(mix, operands.v)
        return self.read_out(out, operands, streams["gate"], sequences), MixerState(memory, shift=shift)

    def operands(
        self, streams: dict[str, Tensor], acc: torch.dtype, sequences: Sequences, carried: Carried
    ) -> Operands:
        """Computes the operands of the recurrence from the streams [B, T, D] in the dtype acc."""
        projections = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        q, k, v = (sequences.tokenwise(p, streams[name]).to(acc) for name, p in projections.items())
        log_decay = -FASTEST * torch.sigmoid((self.decay_bias + self.decay(streams["decay"])).to(acc))
        rate = torch.sigmoid((self.rate_bias + self.rate(streams["rate"])).to(acc))
        v = self.with_first(v, streams["v"], carried)
        read = F.normalize(self.heads(k * self.k_read), dim=-1)
        k = k + k * (rate - 1) * self.k_rate
        q, k, v, log_decay, rate = (self.heads(y) for y in (q, k, v, log_decay, rate))
        return Operands(q, k, v, log_decay, read, read * rate)

    def with_first(self, v: Tensor, x: Tensor, carried: Carried) -> Tensor:
        """Mixes the values [B, T, D] of the tokens x [B, T, D] with those of the first layer that was called."""
        if carried.value is None:
            carried.layer, carried.value = self.layer_idx, v
        first = carried.value
        if carried.layer == self.layer_idx:  # again, if activations are recomputed
            reached = first.requires_grad or not v.requires_grad
            require(reached, "use_reentrant=True gives no gradient to RWKV-7's values; expected use_reentrant=False")
        if self.value is None or self.value_bias is None:
            return v
        return torch.lerp(v, first.to(v), torch.sigmoid((self.value_bias + self.value(x)).to(v.dtype)))

    def heads(self, x: Tensor) -> Tensor:
        """Splits the last dimension into [H, K]."""
        return x.unflatten(-1, (self.H, self.K))

    def read_out(self, out: Tensor, x: Operands, gate_input: Tensor, sequences: Sequences) -> Tensor:
        """Applies norm, bonus, gate and output projection to out [B, T, H, K]."""
        weight, bias, bonus = (self.heads(p) for p in (self.norm_weight, self.norm_bias, self.bonus))
        out = F.layer_norm(out, (self.K,), eps=self.eps) * weight + bias
        out = out + (x.q * x.k * bonus).sum(-1, keepdim=True) * x.v
        return sequences.tokenwise(self.o_proj, out.flatten(-2).to(gate_input.dtype) * self.gate(gate_input))


KINDS["rwkv7"] = MatrixKind(
    Facts(
        "headrace.extra.rwkv7.RWKV7",
        Update("diag(α) − (a κ)ᵀκ", "v", "α, per key channel", "½‖v − kS‖²"),
        flops=9,  # decay: 1; κ S: 2; − (a κ)ᵀ (κ S): 2; + kᵀ v: 2; q S: 2
    ),
    (*RANKS, "eps"),
    shapes=lambda spec, hidden_size, memory: {"memory": memory, "shift": (1, hidden_size)},
)
register_mixer(
    "rwkv7",
    MatrixSpec("rwkv7", width=64),  # RWKV-LM: head_size 64
    about="A delta rule whose removal key, replacement key and strength per channel are separate.",
    paper="https://arxiv.org/abs/2503.14456",
)
