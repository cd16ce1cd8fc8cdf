"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Dimensions: B batch, T new tokens, L all tokens so far, D hidden size, H heads, c size of the latent, r dimension of the
shared keys, n dimension of a head's own part of q and k, v dimension of its values.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.attention.attention import SoftmaxAttention, normalize
from ..layers.rotary import Angles, rotate
from ..ops.modules import is_plain
from ..ops.sequences import Sequences
from .registration import register_mixer
from .specs.latent import LatentSpec


class LatentAttention(SoftmaxAttention):
    """Softmax attention whose keys and values are projections of a latent. The state has the shared keys as k [N, L, 1,
    r] and the normalized latents as v [N, L, 1, c]. The first r channels of a query belong to the shared keys.

    Args: as in SoftmaxAttention; norm_eps is the epsilon of the latents' norms, unless the spec has its own.
    """

    spec: Any

    def _build(self, norm_eps: float, out_size: int) -> None:
        spec, D, H, eps = self.spec, self.hidden_size, self.H, self.spec.norm_eps or norm_eps
        c, self.key_dim, self.rotary_dim, self.value_dim = spec.sizes(D, H)
        self.q_a_proj, self.q_a_norm = None, None
        if spec.q_rank is not None:
            self.q_a_proj = nn.Linear(D, spec.q_rank, bias=spec.bias)
            self.q_a_norm = nn.RMSNorm(spec.q_rank, eps=eps)
        self.q_proj = nn.Linear(spec.q_rank or D, H * self.head_dim, bias=False)
        self.kv_a_proj = nn.Linear(D, c + self.rotary_dim, bias=spec.bias)  # latent, then shared key
        self.kv_a_norm = nn.RMSNorm(c, eps=eps)
        self.kv_b_proj = nn.Linear(c, H * (self.key_dim + self.value_dim), bias=False)  # of each head k, then v
        self.o_proj = nn.Linear(H * self.value_dim, out_size, bias=spec.bias)
        if spec.gated:
            self.g_proj = nn.Linear(D, H * self.value_dim if spec.gate == "channel" else H, bias=False)

    def _query(self, x: Tensor, sequences: Sequences, turn: Angles | None = None, projections: Any = None) -> Tensor:
        if self.q_a_proj is not None:
            x = normalize(self.q_a_proj(x), self.q_a_norm)
        return super()._query(x, sequences, turn)

    def _key_value(
        self, x: Tensor, sequences: Sequences, turn: Angles | None = None, projections: Any = None
    ) -> tuple[Tensor, Tensor]:
        latent, shared = self.kv_a_proj(x).split([self.kv_a_norm.weight.numel(), self.rotary_dim], -1)
        shared, latent = shared[..., None, :], normalize(latent, self.kv_a_norm)[..., None, :]
        return shared if turn is None else rotate(shared, turn), latent

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, packed: Sequences | None = None
    ) -> Tensor:
        """Computes attention to the latents: q [B, T, H, r + n]; k [B, L, 1, r]; v [B, L, 1, c] -> [B, T, H, v].

        Few queries are projected to the latents, which are then keys and values of one head; for many queries,
        projecting the latents to keys and values of all heads takes fewer operations. The latter is also done if
        kv_b_proj is not a plain layer, but quantized or with an adapter."""
        q, k = self._rotated(q, k, valid, packed)
        valid = valid if packed is None else packed.pairs
        k, v = k.to(q.dtype), v.to(q.dtype)
        n = self.key_dim
        if q.shape[1] > (n + self.value_dim) // 2 or not is_plain(self.kv_b_proj, nn.Linear):
            own, values = self.kv_b_proj(v[:, :, 0]).unflatten(-1, (q.shape[2], -1)).split([n, self.value_dim], -1)
            keys = torch.cat([k.expand(-1, -1, q.shape[2], -1), own], -1)
            return self._attend(q, keys, values, valid)
        to_keys, to_values = self.kv_b_proj.weight.unflatten(0, (q.shape[2], -1)).split([n, self.value_dim], 1)
        shared, own = q.split([self.rotary_dim, n], -1)
        query = torch.cat([shared, torch.einsum("bthn,hnc->bthc", own, to_keys)], -1)
        query = query * (query.shape[-1] / self.head_dim) ** 0.5  # PyTorch's kernels divide by the root of its width
        return torch.einsum("bthc,hvc->bthv", self._attend(query, torch.cat([k, v], -1), v, valid), to_values)


register_mixer(
    "mla",
    LatentSpec(),
    about="Multi-head latent attention: keys and values are projections of one latent per token, which is the cache.",
    paper="https://arxiv.org/abs/2405.04434",
)
