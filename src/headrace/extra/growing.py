"""Softmax attention whose logits grow with the position of the query: q at position p is multiplied by
1 + β log(1 + ⌊p / n⌋), so that the softmax over many tokens stays sharp (Ministral 3).

Dimensions: B batch, T queries, H query heads, d head dimension.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.attention.attention import SoftmaxAttention
from ..layers.linear.token import TOKENS
from ..spec.mixer import Facts
from ..spec.record import PositiveFloat, PositiveInt
from ..spec.serialize import TYPES
from ..utils.device import float64
from .dense import DenseSpec, refuse


@dataclass(frozen=True)
class GrowingSpec(DenseSpec):
    """Softmax attention with a factor of q that grows with its position."""

    growth: PositiveFloat = 0.1  # β
    period: PositiveInt = 16384  # n, number of tokens after which the factor grows

    change = "a factor of q that grows with its position (growth)"
    facts = Facts("headrace.extra.growing.GrowingAttention", cached=True)

    def _objections(self):
        yield from super()._objections()
        late = not self.rotary or self.rope.by_length
        yield late, f"growth={self.growth} needs rotary=True with a rope.kind that does not depend on the length"


class Turn(NamedTuple):
    """Cosines and sines, and the factors of q [B or 1, T, 1, 1]."""

    cos: Tensor
    sin: Tensor
    factor: Tensor


class GrowingAttention(SoftmaxAttention):
    """The layer of a GrowingSpec."""

    spec: Any

    def _angles(self, positions: Tensor, lengths: Tensor | None = None) -> Any:
        periods = float64(positions[..., None, None] // self.spec.period)
        return Turn(*super()._angles(positions, lengths), 1 + self.spec.growth * torch.log1p(periods))

    def _query(self, x: Tensor, sequences: Any, turn: Any = None, projections: Any = None) -> Tensor:
        q = super()._query(x, sequences, turn and turn[:2], projections)
        return q if turn is None else q * turn.factor.to(q.dtype).to(q.device)

    def _key_value(self, x: Tensor, sequences: Any, turn: Any = None, projections: Any = None) -> tuple[Tensor, Tensor]:
        return super()._key_value(x, sequences, turn and turn[:2], projections)


TYPES["growing"] = GrowingSpec
TOKENS[GrowingSpec.facts.layer] = refuse
