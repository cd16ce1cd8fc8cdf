"""`QueryKey`, what q or k has between the short convolution and the recurrence: the gate of head competition, a norm
over its channels, and the rotary embedding.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key dimension per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6  # of both norms


class Activation(NamedTuple):
    """How scores become gates."""

    kind: str = "softmax"  # over the heads; "null", the same with one more logit of 0; or "sigmoid"
    temperature: float = 1.0  # divides the scores
    offset: float = 0.0  # subtracted from a sigmoid's scores
    identity: bool = False  # whether gates are divided by their value at zero scores
    log: bool = True  # whether the result is the gates' logarithm


class QueryKey(NamedTuple):
    """The arguments of y = rotary(norm(x)) of q or k, and of the gates of the scores s_h = ⟨x_h, w_h⟩."""

    x: Tensor  # [B, T, Hq, K]
    positions: Tensor | None = None  # integers [B or 1, T]; None: no rotary embedding
    weight: Tensor | None = None  # [H, K]; None: no gates
    norm: str = "none"  # inputs.qk_norm of the spec: none, l2 or sum
    theta: float = 10000.0  # base of the rotary embedding
    # The fields of an Activation.
    kind: str = "softmax"
    temperature: float = 1.0
    offset: float = 0.0
    identity: bool = False
    log: bool = True

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:3]

    @property
    def activation(self) -> Activation:
        return Activation(*self[5:])

    @property
    def changes_x(self) -> bool:
        """Whether y is not x itself."""
        return self.norm != "none" or self.positions is not None

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns empty tensors for y [B, T, Hq, K], if it is not x itself, and the gates [B, T, H], if any."""
        y = torch.empty_like(self.x, memory_format=torch.contiguous_format) if self.changes_x else None
        if self.weight is None:
            return y, None
        return y, self.x.new_empty((*self.x.shape[:2], len(self.weight)), dtype=torch.float32)
