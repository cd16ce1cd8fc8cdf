"""Softmax attention with an RMSNorm of the heads of q and k after the rotation: with weights (Hunyuan), or without them
(nanochat). With weights it differs from a norm before the rotation, as channels that turn together have different
weights; without weights the two are equal, as a rotation keeps the length.

Dimensions: B batch, T queries, L keys, H query heads, Hkv key/value heads, d head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.attention.attention import SoftmaxAttention, normalize
from ..layers.linear.token import TOKENS
from ..ops.backends.native.program import Program
from ..spec.mixer import Facts
from ..spec.serialize import TYPES
from .attention_token import add_attention
from .dense import DenseSpec, refuse


@dataclass(frozen=True)
class LateNormSpec(DenseSpec):
    """Softmax attention with a norm of the heads of q and k after the rotation."""

    weights: bool = True  # whether the norms have weights

    change = "a norm of q and k after the rotation"
    facts = Facts("headrace.extra.late_norm.LateNormAttention", cached=True)

    def _objections(self):
        yield from super()._objections()
        once = self.qk_norm == "none" and self.scale == "key"
        yield not once, f"qk_norm={self.qk_norm!r}, scale={self.scale!r} with late norms; expected 'none' and 'key'"
        longer = self.rotary and self.rope.scale != 1
        yield longer and not self.weights, "a factor of the rotated channels would not outlast a norm without weights"


class LateNormAttention(SoftmaxAttention):
    """The layer of a LateNormSpec."""

    spec: Any

    def _build(self, norm_eps: float, out_size: int) -> None:
        super()._build(norm_eps, out_size)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, norm_eps, self.spec.weights) for _ in range(2))

    def _heads(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        x = super()._heads(x)
        return x if norm is None or self.spec.weights else norm(x)

    def _query(self, *given: Any) -> Tensor:
        q = super()._query(*given)
        return q if self._waits else normalize(q, self.q_norm)

    def _key_value(self, *given: Any) -> tuple[Tensor, Tensor]:
        k, v = super()._key_value(*given)
        d = self.head_dim  # after which `forget` has its logits
        return k if self._waits else torch.cat([normalize(k[..., :d], self.k_norm), k[..., d:]], -1), v

    def _rotated(self, *given: Any) -> tuple[Tensor, Tensor]:
        q, k = super()._rotated(*given)
        return (normalize(q, self.q_norm), normalize(k, self.k_norm)) if self._waits and self.spec.weights else (q, k)

    @property
    def _waits(self) -> bool:
        """Whether q and k of the cache have no norm yet, or need none."""
        return not self.spec.weights or (self.spec.rotary and self.spec.rope.by_length)


def add_token(program: Program, mixer: Any, *where: Any, **how: Any) -> None:
    (refuse if mixer.spec.weights else add_attention)(program, mixer, *where, **how)


TYPES["late-norm"] = LateNormSpec
TOKENS[LateNormSpec.facts.layer] = add_token
