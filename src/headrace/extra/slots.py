"""Attention to a fixed number of slots: gated slot attention (GSA, arXiv 2409.07146) and attention with bounded-memory
control (ABC, arXiv 2110.02488). A head has a key and a value per slot, which are means of those of the past:

    K_t = diag(α_t) K_{t−1} + (1 − α_t)ᵀ k_t
    V_t = diag(α_t) V_{t−1} + (1 − α_t)ᵀ v_t        o_t = softmax(q_t K_tᵀ) V_t

Both are linear attention: the logits q K_tᵀ with a decay per value channel (gla_outer.py), the rest with one per key
channel. In GSA, α is a gate σ(w)^{1/8} of the token. In ABC a slot is a mean with the weights e^w, so that 1 − α_t is
e^{w_t} over the sum of these weights so far.

Dimensions: B batch, T tokens, D hidden size, H heads, M slots, K key, V value dimension per head, N sequences.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.linear.token import MixerState
from ..layers.maps import mixed
from ..ops.attention import linear_attention
from ..ops.backends.base import HasBackend
from ..ops.call import accumulator
from ..ops.dispatch import default_backend
from ..ops.sequences import Sequences
from ..spec.mixer import Facts, Shapes, Update
from .chunks import MatrixMixer, recur
from .gla_outer import Operands, form, step
from .registration import register_mixer
from .scan import elementwise
from .specs.matrix import KINDS, MatrixKind, MatrixSpec

TEMPERATURE = 8.0  # of GSA's gate
LARGEST = 32.0  # of |w| in ABC, as in FLA's layer: sums of e^w over any number of tokens are finite in float32


class SlotAttention(MatrixMixer, HasBackend):
    """Slot attention between two projections. In GSA, SiLU is applied to q, k and v, the logits have the scale 1, and
    the output is W RMSNorm(SiLU(o)) with a norm over all heads; ABC's logits have the scale K^−1/2, and
    its output is W o. The memory [N, H, M, ·] has per slot the key, the value, and in ABC the sum of weights."""

    def __init__(self, spec: MatrixSpec, *, hidden_size: int, num_heads: int, norm_eps: float = 1e-6, **unused):
        super().__init__(spec, hidden_size, num_heads)
        H, K, V = self.H, self.K, self.V
        self.gated, self.backend, self.norm_eps = spec.kind == "gsa", default_backend(), spec.eps or norm_eps
        _, M, width = self.state_shapes["memory"]
        self.parts, self.widths = [H * K, H * K, H * V, H * M], [K, V, width - K - V]
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=False)
        self.o_proj = nn.Linear(H * V, hidden_size, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(H * V)) if self.gated else None
        self.op = linear_attention  # may be set to a partial with a form or chunk size
        self.reset_parameters()

    @property
    def static_shapes(self) -> bool:
        return self.gated and super().static_shapes

    @property
    def stacks(self) -> dict[str, dict[str, int]]:
        return {"in_proj.weight": dict(zip("qkvw", self.parts, strict=True))}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.norm_weight is not None:
            self.norm_weight.fill_(1)

    def run(self, x: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        acc = accumulator(x)
        parts = sequences.tokenwise(self.in_proj, x).split(self.parts, -1)
        q, k, v, w = (y.unflatten(-1, (self.H, -1)).to(acc) for y in parts)
        memory = q.new_zeros(sequences.count, *self.state_shapes["memory"]) if state is None else state.memory
        if self.gated:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        out, memory = self.recurrence(self._attend, q, k, v, w, memory, sequences)
        if self.norm_weight is not None:
            out = F.rms_norm(F.silu(out).flatten(-2), self.norm_weight.shape, self.norm_weight.to(acc), self.norm_eps)
            out = out.unflatten(-1, (self.H, -1))
        return sequences.tokenwise(self.o_proj, out.flatten(-2).to(x.dtype)), MixerState(memory)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, memory: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Returns o [B, T, H, V] and the next memory."""
        keys, values, sums = memory.split(self.widths, -1)
        if self.gated:
            log_decay = F.logsigmoid(w) / TEMPERATURE
            write = -torch.expm1(log_decay)
        else:
            q = q * q.shape[-1] ** -0.5
            write, sums = self._share(w, sums, sequences)
            log_decay = torch.log1p(-write)
        operands = Operands(q, k, write, torch.zeros_like(k), log_decay)
        logits, keys = recur(step, form, operands, sequences, keys.mT)
        read = partial(
            self.op, logits.softmax(-1), write, log_decay=log_decay, scale=1.0, initial_state=values,
            cu_seqlens=sequences.bounds, backend=self.backend,
        )  # fmt: skip
        out, values = mixed(read, v)
        return out, torch.cat([keys.mT, values, sums], -1)

    def _share(self, w: Tensor, sums: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns e^w over the sum of all e^w so far [B, T, H, M], and the next sums [N, H, M, 1]. The first token's
        share, which is 1, is rounded down, so that log(1 − share) is finite."""
        weight = w.clamp(-LARGEST, LARGEST).exp()
        total, after = elementwise(
            torch.ones_like(weight).flatten(2), weight.flatten(2), sums.flatten(1)[:, None], sequences
        )
        share = weight / total.view_as(weight)
        return share.clamp(max=1 - torch.finfo(w.dtype).eps), after.view_as(sums)


def shapes(spec: MatrixSpec, hidden_size: int, memory: tuple[int, int, int]) -> Shapes:
    """Per slot: a key, a value, and the sum of weights of ABC."""
    H, K, V = memory
    return {"memory": (H, spec.slots or K, K + V + (spec.kind == "abc"))}


FLOPS = 5  # decay: 1; + (1 − α)ᵀ (k, v): 2; q Kᵀ and p V: 2
UPDATES = {
    "gsa": Update("diag(α)", "(k, v)", "α, per slot"),
    "abc": Update("diag(1 − p)", "(k, v)", "1 − p, per slot; p = e^w / Σ e^w"),
}
for _kind, _update in UPDATES.items():
    _facts = Facts("headrace.extra.slots.SlotAttention", _update, FLOPS)
    KINDS[_kind] = MatrixKind(_facts, ("slots", "expand_k", "expand_v", *["eps"] * (_kind == "gsa")), False, shapes)
register_mixer(
    "gsa",
    MatrixSpec("gsa", slots=64),  # its authors' GSAConfig: num_slots 64, num_heads 4
    about="Gated slot attention: a softmax over slots, whose keys and values are decaying means of the past.",
    paper="https://arxiv.org/abs/2409.07146",
)
register_mixer(
    "abc",
    MatrixSpec("abc", slots=64),  # ABCConfig of flash-linear-attention: num_slots 64
    about="Attention with bounded-memory control: a softmax over slots, whose keys and values are weighted means.",
    paper="https://arxiv.org/abs/2110.02488",
)
