"""Softmax attention whose logits are bounded: a logit x becomes c tanh(x / c) before the mask and the softmax (Gemma 2,
arXiv 2408.00118, section 2).

PyTorch's kernels have no such bound. Here the logits of few queries are computed at a time, in float32 at least: near
50, bfloat16 would round them to multiples of 0.25.

Dimensions: B batch, T queries, L keys, H query heads, Hkv key/value heads, d head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layers.attention.attention import SoftmaxAttention
from ..layers.attention.sdpa import visible
from ..layers.linear.token import TOKENS
from ..ops.call import accumulator
from ..spec.mixer import Facts
from ..spec.record import PositiveFloat
from ..spec.serialize import TYPES
from ..utils.device import without_autocast
from .dense import QUERIES, DenseSpec, refuse


@dataclass(frozen=True)
class CappedSpec(DenseSpec):
    """Softmax attention whose logits are bounded."""

    cap: PositiveFloat = 50.0  # bound c of the logits, which become c tanh(logits / c), but for that of `null`

    change = "a bound of the logits (cap)"
    facts = Facts("headrace.extra.capped.CappedAttention", cached=True)


class CappedAttention(SoftmaxAttention):
    """The layer of a CappedSpec."""

    spec: Any

    def weigh(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, bias: Tensor | None = None, *,
        null: bool | Tensor = False, causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Computes `sdpa.weigh` with bounded logits."""
        acc, dtype, out, end = accumulator(q), q.dtype, [], 0
        q, k, v = q.to(acc), k.to(acc), v.to(acc)
        with without_autocast(q):
            for queries in [q] if torch.compiler.is_compiling() else q.split(QUERIES, 1):
                start, end = end, end + queries.shape[1]
                past = end if causal else k.shape[1]
                seen, added = (x if x is None else x[:, :, start:end] for x in (allowed, bias))
                if causal:
                    seen = visible(queries, k[:, :past], None, True)[:, None]
                out.append(self._piece(queries, k[:, :past], v[:, :past], seen, added, null))
        return torch.cat(out, 1).to(dtype)

    def _piece(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None, null: bool | Tensor
    ) -> Tensor:
        cap, heads = self.spec.cap, (k.shape[2], -1)
        logits = torch.einsum("btgrd,blgd->bgrtl", q.unflatten(2, heads), k).flatten(1, 2)
        logits = cap * torch.tanh(logits * (q.shape[-1] ** -0.5 / cap))
        if bias is not None:
            logits = logits + bias
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        if null is not False:
            first = null if isinstance(null, Tensor) else logits.new_zeros(logits.shape[1])
            logits = torch.cat([first.to(logits)[:, None, None].expand(*logits.shape[:3], 1), logits], -1)
        weights = logits.softmax(-1)[..., logits.shape[-1] - k.shape[1] :].unflatten(1, heads)
        return torch.einsum("bgrtl,blgd->btgrd", weights, v).flatten(2, 3)


TYPES["capped"] = CappedSpec
TOKENS[CappedSpec.facts.layer] = refuse
