"""Gated linear attention with the general gate of arXiv 2312.06635, section 4.1: the decay of a memory entry is the
product of a decay of its key channel and a decay of its value channel.

Dimensions: B batch, T tokens, D hidden size, H heads, K key, V value dimension per head, N sequences, M chunks, C
tokens per chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.linear.decays import SigmoidDecay
from ..layers.linear.token import MixerState
from ..ops.call import accumulator
from ..ops.sequences import Sequences
from ..spec.decay import Decay
from ..spec.mixer import Facts, Update
from ..utils.device import float64
from .chunks import MatrixMixer, carry, recur
from .dplr import decays_between, halves
from .registration import register_mixer
from .specs.matrix import KINDS, MatrixKind, MatrixSpec


class Operands(NamedTuple):
    """q, k and k_decay [B, T, H, K], v and v_decay [B, T, H, V], all in one precision. Decays are logarithms ≤ 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_decay: Tensor
    v_decay: Tensor


def form(counts: list[int], S: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """Computes S_t = e^{a_t}ᵀ e^{b_t} ⊙ S_{t−1} + kᵀ v and out = q S_t for chunks, as `chunks.chunkwise` requires.

    With A, B the cumulative sums of a, b in a chunk, out_i = Σ_j ((q_i e^{A_i − A_j}) k_jᵀ) v_j e^{B_i − B_j}. This is
    a matrix product if both exponents are split at a token between j and i, as `decays_between` does for i in the
    second and j in the first half of each block of 2, 4, … tokens.
    """
    q, k, v, a, b = (y.transpose(1, 2) for y in operands)
    A, B = float64(a).cumsum(2), float64(b).cumsum(2)
    exp = lambda exponent: exponent.to(q.dtype).to(q.device).exp()  # noqa: E731
    out = (q * k).sum(-1, keepdim=True) * v
    for keys, values in zip(decays_between(A, 1, exp), decays_between(B, 1, exp), strict=True):
        (_, late), (early, _), (written, _) = (halves(y, keys[0].shape[3]) for y in (q, k, v))
        read = (late * keys[0]) @ (early * keys[1]).mT @ (written * values[1]) * values[0]
        out = out + torch.stack([torch.zeros_like(read), read], 3).flatten(2, 4)
    all_a, all_b = A[:, :, -1:], B[:, :, -1:]
    new = (k * exp(all_a - A)).mT @ (v * exp(all_b - B))
    fade = exp(all_a).mT * exp(all_b)
    starts, S = carry(lambda S, fade, new: torch.addcmul(new, fade, S), S, counts, fade, new)
    return (out + (q * exp(A)) @ starts * exp(B)).transpose(1, 2), S


def step(x: Operands, S: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one token of each sequence: x [N, 1, H, ·], S [N, H, K, V]."""
    q, k, v, a, b = (y.transpose(1, 2) for y in x)
    S = a.mT.exp() * b.exp() * S + k.mT @ v
    return (q @ S).transpose(1, 2), S


class GLAOuter(MatrixMixer):
    """GLA's layer with a decay per key channel and a decay per value channel."""

    def __init__(self, spec: MatrixSpec, *, hidden_size: int, num_heads: int, norm_eps: float = 1e-6, **unused):
        super().__init__(spec, hidden_size, num_heads)
        self.norm_eps = norm_eps
        decay = Decay("sigmoid", rank=spec.rank or 16)
        self.k_decay = SigmoidDecay(decay, self.H, self.K, 0)
        self.v_decay = SigmoidDecay(decay, self.H, self.V, 0)
        keys, values = self.H * self.K, self.H * self.V
        self.parts = [keys, keys, values, values, self.k_decay.in_features, self.v_decay.in_features]
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=False)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(self.V))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.norm_weight.fill_(1)

    def run(self, x: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        acc = accumulator(x)
        q, k, v, gate, *decays = sequences.tokenwise(self.in_proj, x).split(self.parts, -1)
        q, k, v = (y.unflatten(-1, (self.H, -1)).to(acc) for y in (q, k, v))
        k_decay, v_decay = map(sequences.tokenwise, (self.k_decay, self.v_decay), decays)
        operands = Operands(q * self.K**-0.5, k, v, k_decay, v_decay)
        out, memory = self.recurrence(recur, step, form, operands, sequences, None if state is None else state.memory)
        out = F.rms_norm(out, (self.V,), self.norm_weight.to(acc), self.norm_eps).to(x.dtype)
        return sequences.tokenwise(self.o_proj, out.flatten(-2) * F.silu(gate)), MixerState(memory)


KINDS["gla-outer"] = MatrixKind(
    Facts(
        "headrace.extra.gla_outer.GLAOuter",
        Update("α … βᵀ", "v", "α βᵀ, per number"),
        flops=6,  # both decays: 2; + kᵀ v: 2; q S: 2
    ),
    ("rank", "expand_k", "expand_v"),
)
register_mixer(
    "gla-outer",
    MatrixSpec("gla-outer", expand_k=0.5),
    about="GLA with a second gate, a decay per value channel.",
    paper="https://arxiv.org/abs/2312.06635",
)
