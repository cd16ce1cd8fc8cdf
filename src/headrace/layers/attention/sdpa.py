"""Softmax attention with PyTorch's kernels: causal, bidirectional, or to another sequence.

Dimensions: B batch, T queries, L keys, H query heads, Hkv key/value heads, d head dimension.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...ops.derivatives import transformed


def weigh(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, bias: Tensor | None = None, *,
    null: bool | Tensor = False, causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Returns softmax(scale q kᵀ + bias) v, with shapes as in `attend`, and allowed and bias [B, 1 or H, T, L].

    scale: None is d^-1/2."""
    if isinstance(null, Tensor) or null:  # adds a token before all others, with this logit and value 0
        width = v.shape[-1]
        q, k, v = (F.pad(x, (0, 0, 0, 0, 1, 0)) for x in (q, k, v))
        if isinstance(null, Tensor):
            q, k, v, scale = _with_logit(q, k, v, null)
        allowed = None if allowed is None else F.pad(allowed, (1, 0, 1, 0), value=True)
        bias = None if bias is None else F.pad(bias, (1, 0, 1, 0))
        return weigh(q, k, v, allowed, bias, causal=causal, scale=scale)[:, 1:, :, :width]
    if bias is not None:
        bias = bias.to(q.dtype)
        allowed = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    # PyTorch's fused kernels have no forward-mode derivative, and raise under vmap for a bias with a gradient.
    lacking = (bias is not None and transformed()) or forward_ad._current_level >= 0
    with sdpa_kernel(SDPBackend.MATH) if lacking and not torch.compiler.is_compiling() else nullcontext():
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), allowed,
            is_causal=causal, scale=scale, enable_gqa=bool(q.shape[2] != k.shape[2]),  # a tensor where torch.jit traces
        )  # fmt: skip
    return out.transpose(1, 2)


def _with_logit(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Adds one channel to q, k and v, by which the first key, of zeros, has a logit [H] per head, and returns the scale
    of the logits. A bias with this logit would be a mask of all pairs of tokens."""
    scale = q.shape[-1] ** -0.5
    own = (logit.to(q.dtype) / scale)[:, None].expand(*q.shape[:3], 1)
    first = (torch.arange(k.shape[1], device=k.device) == 0).to(k.dtype)[:, None, None].expand(*k.shape[:3], 1)
    return torch.cat([q, own], -1), torch.cat([k, first], -1), F.pad(v, (0, 1)), scale


def attend(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, *,
    causal: bool = True, bias: nn.Module | None = None, null: bool | Tensor = False, fade: Tensor | None = None,
    weigh: Any = weigh,
) -> Tensor:  # fmt: skip
    """Softmax attention: q [B, T, H, d]; k, v [B, L, Hkv, d], Hkv dividing H -> [B, T, H, d].

    Args:
        valid: [B, L]; False marks padding, to which no other token attends. If causal, padding attends to itself, since
            a query without keys would give NaN; otherwise every row needs a valid key. Or [B, T, L]: which queries
            attend to which keys, of tokens without padding.
        causal: True if the queries are the last T of the L tokens and attend to no later ones. False if every query
            attends to all keys, as in an encoder and in cross-attention.
        bias: maps distances from key to query [B, T, L] to what is added to the logits, [B, H, T, L]; the queries must
            be tokens of the keys' sequence.
        null: whether every softmax has one more logit 0, with value 0; or this logit by head, [H].
        fade: [B, H, T, L], added to the logits.
        weigh: computes the logits, their softmax and the mean of the values.
    """
    T, L = q.shape[1], k.shape[1]
    if valid is None and bias is None and fade is None and (not causal or T in (1, L)):
        return weigh(q, k, v, null=null, causal=causal if T > 1 else False)
    logits = fade
    if bias is not None:
        places = torch.arange(L, device=q.device)[None] if valid is None or valid.dim() == 3 else valid.cumsum(1) - 1
        logits = bias(places[:, L - T :, None] - places[:, None]) + (0 if fade is None else fade)
    return weigh(q, k, v, visible(q, k, valid, causal)[:, None], logits, null=null)


def visible(q: Tensor, k: Tensor, valid: Tensor | None, causal: bool) -> Tensor:
    """Returns the mask [B or 1, T, L] of `attend`, True where the query attends to the key."""
    T, L = q.shape[1], k.shape[1]
    own, keys = torch.arange(L - T, L, device=q.device)[:, None], torch.arange(L, device=q.device)
    allowed = (keys <= own if causal else torch.ones_like(keys <= own))[None]
    if valid is None or valid.dim() == 3:
        return allowed if valid is None else allowed & valid
    return allowed & valid[:, None] | (keys == own) & causal
