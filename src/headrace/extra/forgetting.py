"""The forget gate f of softmax attention (Forgetting Transformer, arXiv 2503.02130): the logit of a query and a key has
the sum of log f over the tokens after the key up to the query.

Dimensions: B batch, T queries, L keys, H query heads, Hkv key/value heads, d head dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.attention.sdpa import attend
from ..spec.attention import LAYERS
from ..utils.device import float64
from .dense import QUERIES


def forgotten(gate: Tensor, valid: Tensor | None) -> Tensor:
    """Returns Σ log σ(gate) over all tokens up to each one, [B, H, L], of which the logit of a query and a key has the
    difference. In float64: float32 sums of thousands of tokens leave few digits of the difference of neighbours.

    gate [B, L, H]; valid [B, L]: False marks padding, which forgets nothing; None: no padding."""
    log_f = F.logsigmoid(float64(gate))
    return (log_f if valid is None else log_f.masked_fill(~valid[..., None].to(log_f.device), 0)).cumsum(1).mT


def attend_fading(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, valid: Tensor | None, **options: Any) -> Tensor:
    """Computes causal `attend` whose logit of key j has total_i − total_j at query i, for the total of `forgotten`.

    gate: [B, L, Hkv, H/Hkv], the logits of f. The differences of few queries at a time are in a processor's cache, and
    those of all are T L numbers per head. A graph that is compiled takes all at once, as its number of tokens may vary.
    """
    pairs = valid is not None and valid.dim() == 3  # of tokens without padding
    total = forgotten(gate.flatten(2), None if pairs else valid)
    end, out = k.shape[1] - q.shape[1], []
    for queries in q.split(max(q.shape[1], 1) if torch.compiler.is_compiling() else QUERIES, 1):
        start, end = end, end + queries.shape[1]
        fade = (total[:, :, start:end, None] - total[:, :, None, :end]).to(q.dtype).to(q.device)
        past = valid if valid is None or pairs else valid[:, :end]
        out.append(attend(queries, k[:, :end], v[:, :end], past, fade=fade, **options))
    return torch.cat(out, 1)


LAYERS["forget"] = f"{__name__}.{attend_fading.__name__}"
