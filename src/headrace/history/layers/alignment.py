"""Attention of a recurrent decoder to the source: a weighted mean of the encoder's annotations for each decoder step.

Additive scores: arXiv 1409.0473. Dot, general and concat scores, and local windows: arXiv 1508.04025. A score maps
(query [B, T, n], keys of annotations [B, L, ·]) to [B, T, L], and a window (query, the first step, valid [B, L]) to
(allowed positions [B, T or 1, L], factor of their weights).

Dimensions: B batch, T decoder steps, L source positions, n width of the decoder, M width of an annotation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.call import accumulator
from ..specs.encoder_decoder import Alignment


class Product(nn.Module):
    """⟨q, h⟩ (dot, M = n) or ⟨q, W h⟩ (general)."""

    def __init__(self, keys: nn.Module):
        super().__init__()
        self.keys = keys

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.mT


class Additive(nn.Module):
    """vᵀ tanh(W q + U h). Luong's concat, vᵀ tanh(W [q; h]), is the same function with one matrix for W and U."""

    def __init__(self, query_size: int, memory_size: int):
        super().__init__()
        self.query = nn.Linear(query_size, query_size, bias=False)
        self.keys = nn.Linear(memory_size, query_size, bias=False)
        self.value = nn.Linear(query_size, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return self.value(torch.tanh(self.query(query)[:, :, None] + keys[:, None])).squeeze(-1)


SCORES: dict[str, Callable[[int, int], nn.Module]] = {
    "additive": Additive,
    "dot": lambda n, M: Product(nn.Identity()),
    "general": lambda n, M: Product(nn.Linear(M, n, bias=False)),
    "concat": Additive,
}


class Global(nn.Module):
    """global: all positions."""

    def __init__(self, query_size: int, reach: int):
        super().__init__()
        self.reach = reach

    def forward(self, query: Tensor, first: int, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        return valid[:, None], None


class Monotonic(Global):
    """local-m: step t attends to the positions t − D … t + D, both counted from 0."""

    def forward(self, query: Tensor, first: int, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        steps = torch.arange(first, first + query.shape[1], device=query.device)
        distance = torch.arange(valid.shape[1], device=query.device) - steps[:, None]
        return valid[:, None] & (distance.abs() <= self.reach), None


class Predictive(Global):
    """local-p: a step attends to positions p − D … p + D, with p = S sigmoid(vᵀ tanh(W q)) in a source of S tokens.
    The weights are multiplied by a Gaussian around p with standard deviation D / 2."""

    def __init__(self, query_size: int, reach: int):
        super().__init__(query_size, reach)
        self.hidden = nn.Linear(query_size, query_size, bias=False)
        self.centre = nn.Linear(query_size, 1, bias=False)

    def forward(self, query: Tensor, first: int, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        share = torch.sigmoid(self.centre(torch.tanh(self.hidden(query)))).to(accumulator(query))
        places = torch.arange(valid.shape[1], device=query.device)
        distance = places - share * valid.sum(1)[:, None, None]
        return valid[:, None] & (distance.abs() <= self.reach), torch.exp(-2 * (distance / self.reach).square())


WINDOWS: dict[str, type[nn.Module]] = {"global": Global, "local-m": Monotonic, "local-p": Predictive}


class Memory(NamedTuple):
    """The source, prepared once for all decoder steps."""

    annotations: Tensor  # [B, L, M], outputs of the encoder
    keys: Tensor  # [B, L, ·], keys of the score function
    valid: Tensor  # [B, L], False marks padding


class AlignmentAttention(nn.Module):
    """Computes the weights of the source positions for each decoder step, and the weighted mean of the annotations."""

    def __init__(self, spec: Alignment, query_size: int, memory_size: int):
        super().__init__()
        self.score: Any = SCORES[spec.score](query_size, memory_size)
        self.window = WINDOWS[spec.window](query_size, spec.reach)

    def memory(self, annotations: Tensor, valid: Tensor) -> Memory:
        """Prepares annotations [B, L, M]. valid [B, L]: False marks padding."""
        return Memory(annotations, self.score.keys(annotations), valid)

    def forward(self, query: Tensor, memory: Memory, first: int = 0) -> tuple[Tensor, Tensor]:
        """query [B, T, n] of the decoder steps first, first + 1, … -> (context [B, T, M], weights [B, T, L]).

        Weights are 0 outside the window. If the window begins after the end of the source, all weights and the context
        are 0."""
        seen, factor = self.window(query, first, memory.valid)
        logits = self.score(query, memory.keys)
        weights = logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1) * seen
        weights = weights if factor is None else weights * factor.to(weights.dtype)
        return weights @ memory.annotations, weights
