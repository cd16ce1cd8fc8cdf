"""Softmax attention with rotary positions and grouped heads: the yardstick, whose state grows with every token.

Dimensions: B batch, T new tokens, L all tokens so far, D hidden size, H query heads, Hkv key/value heads, d head
dimension, N sequences.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..gates import rotary
from ..packing import Sequences
from ..spec import AttentionSpec


class AttentionState(NamedTuple):
    """The keys and values of every token so far, keys already rotated."""

    k: Tensor  # [N, L, Hkv, d]
    v: Tensor  # [N, L, Hkv, d]
    valid: Tensor | None = None  # [N, L] bool: False is padding; None: no padding


class SoftmaxAttention(nn.Module):
    """Causal softmax attention (arXiv 1706.03762) with rotary positions (arXiv 2104.09864) and grouped key/value heads
    (arXiv 2305.13245), with Llama's projections and conventions.

    Args: as LinearMixer's; the layer's place and norm_eps mean nothing here.
    """

    def __init__(
        self, spec: AttentionSpec, *, hidden_size: int, num_heads: int, layer_idx: int = 0, num_layers: int = 1,
        norm_eps: float = 1e-6, rope_theta: float = 10000.0,
    ):  # fmt: skip
        super().__init__()
        self.spec, self.rope_theta = spec, rope_theta
        H, (self.head_dim, _) = spec.num_heads(num_heads), spec.head_dims(hidden_size, num_heads)
        kv_width = (spec.kv_heads or H) * self.head_dim
        self.q_proj = nn.Linear(hidden_size, H * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(H * self.head_dim, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """x [B, T, D] -> (y [B, T, D], state). mask [B, T]: False is padding; cu_seqlens [N + 1]: x is a pack."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.spec.rotary:
            positions = _positions(x, state, mask, cu_seqlens)
            q, k = rotary(q, positions, self.rope_theta), rotary(k, positions, self.rope_theta)
        if cu_seqlens is None:
            state = _extended(state, k, v, mask)
            out = attend(q, *state)
        else:
            out, state = _attend_packed(q, k, v, state, cu_seqlens.diff().tolist())
        return self.o_proj(out.flatten(-2)), state


def attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
    """q [B, T, H, d] are the last T of the L tokens of k, v [B, L, Hkv, d] and see no later ones -> [B, T, H, d].

    valid [B, L]: False is padding, seen by itself alone (a query that sees nothing would be NaN)."""
    T, L = q.shape[1], k.shape[1]
    allowed = None
    if valid is not None or 1 < T < L:
        own, keys = torch.arange(L - T, L, device=q.device)[:, None], torch.arange(L, device=q.device)
        allowed = keys <= own
        if valid is not None:
            allowed = (allowed & valid[:, None] | (keys == own))[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), allowed,
        is_causal=allowed is None and T > 1, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def _positions(x: Tensor, state: AttentionState | None, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """How many tokens, not counting padding, came before each one: [B, T] or [1, T]."""
    seen = None if state is None else _valid(state.k, state.valid).sum(1)
    if mask is None:
        return Sequences(x, cu_seqlens).positions(seen, x)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return positions if seen is None else positions + seen[:, None]


def _valid(k: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if mask is None else mask


def _extended(state: AttentionState | None, k: Tensor, v: Tensor, mask: Tensor | None) -> AttentionState:
    if state is None:
        return AttentionState(k, v, mask)
    valid = None
    if state.valid is not None or mask is not None:
        valid = torch.cat([_valid(state.k, state.valid), _valid(k, mask)], 1)
    return AttentionState(torch.cat([state.k, k], 1), torch.cat([state.v, v], 1), valid)


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, state: AttentionState | None, lengths: list[int]
) -> tuple[Tensor, AttentionState]:
    """One attention per sequence: no work and no memory for pairs of tokens of different sequences."""
    out, keys, values = [], [], []
    for n, (qn, kn, vn) in enumerate(zip(*(x[0].split(lengths) for x in (q, k, v)), strict=True)):
        if state is not None:
            past = _valid(state.k, state.valid)[n]
            kn, vn = torch.cat([state.k[n, past], kn]), torch.cat([state.v[n, past], vn])
        out.append(attend(qn[None], kn[None], vn[None])[0])
        keys.append(kn)
        values.append(vn)
    seen = torch.tensor([len(kn) for kn in keys], device=k.device)
    valid = torch.arange(max(map(len, keys)), device=k.device) < seen[:, None]
    return torch.cat(out)[None], AttentionState(pad_sequence(keys, True), pad_sequence(values, True), valid)
