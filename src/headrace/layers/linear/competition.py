"""Head competition: the gates that heads compute by a softmax over the heads.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.backends.torch.competition import activate, scores
from ...ops.dispatch import choose
from ...ops.modules import is_plain
from ...ops.query_key import Activation, QueryKey
from ...spec.linear import Competition
from ..base import SelfInitialised


class Gate(SelfInitialised):
    """Base of the modules that head competition adds to a mixer. The optimiser applies no weight decay to their
    parameters, and retrofitting a trained model initialises only these."""

    @property
    def no_weight_decay(self) -> tuple[str, ...]:
        return tuple(self._parameters)


class HeadCompetition(Gate):
    """Logarithm of one gate per token and head, computed by a softmax over the heads (arXiv 2602.01744, equation 4).

    The source of the scores s_h is: "head", ⟨q_h, w_h⟩; "diag", where the gate is entry h of softmax(q_h W); "query", a
    linear map of all heads' q; "hidden", a linear map of the layer's input. Write gates use k in place of q. Weights
    are initialised to zero, without random numbers. With scale "identity" the gate is divided by its value at zero
    scores, so that the initial layer equals the mixer without competition bit for bit.
    """

    def __init__(
        self, spec: Competition, hidden_size: int, num_heads: int, key_heads: int, key_dim: int, memories: int = 1
    ):
        """memories: number of memories per head; all H · memories of them compete, and replace the heads below."""
        super().__init__()
        self.spec, self.memories = spec, memories
        self.num_heads = num_heads = num_heads * memories
        self.repeats = num_heads // key_heads  # how many heads share a head of q or k
        shapes = {
            "head": (num_heads, key_dim),
            "diag": (key_dim, num_heads),
            "query": (num_heads, key_heads * key_dim),
            "hidden": (num_heads, hidden_size),
        }
        self.weight = nn.Parameter(torch.zeros(shapes[spec.source]))

    @property
    def activation(self) -> Activation:
        """How scores become log gates; the offset is of a sigmoid whose value is 1 / range at a score of zero."""
        spec = self.spec
        largest = self.num_heads if spec.range == "heads" else spec.range
        offset = math.log(largest - 1) if largest > 1 else -math.inf
        return Activation(spec.activation, spec.temperature, offset, spec.scale == "identity")

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def in_query_key(self, log: bool) -> dict[str, Any] | None:
        """Returns the arguments of a `QueryKey` that computes the gate, or its logarithm, from this module's weights;
        None for other sources than "head", for shuffled gates, and for a module that has to be called."""
        if self.spec.source != "head" or self.spec.shuffle or not is_plain(self, HeadCompetition):
            return None
        return {"weight": self.weight, **self.activation._replace(log=log)._asdict()}

    def scores(self, heads: Tensor, x: Tensor) -> Tensor:
        """Returns the scores [B, T, H], or [B, T, H, H] for source="diag".

        Args:
            heads: q or k [B, T, Hq, K] after the short convolution.
            x: the layer's input [B, T, D].
        """
        if self.spec.source == "hidden":
            return F.linear(x, self.weight)
        if self.spec.source == "query":
            return F.linear(heads.flatten(-2), self.weight)
        if self.spec.source == "diag":
            return heads.repeat_interleave(self.repeats, -2) @ self.weight
        return scores(heads, self.weight)

    def forward(self, heads: Tensor, x: Tensor, positions: Tensor | None = None, backend: str = "auto") -> Tensor:
        """Returns the logarithm of the gate [B, T, H].

        Args:
            heads, x: as in `scores`.
            positions: [B or 1, T], of each token in its sequence; needed for spec.shuffle only.
            backend: "auto", or a name from `backends()`; computes the gates of source="head".

        Raises:
            InputError: for a backend that cannot compute them.
        """
        log_gate = self._log_gate(heads, x, backend)
        if positions is None or not self.spec.shuffle:
            return log_gate
        owner = (torch.arange(self.num_heads, device=x.device) + positions[..., None]) % self.num_heads
        return log_gate.gather(-1, owner.expand_as(log_gate))

    def _log_gate(self, heads: Tensor, x: Tensor, backend: str) -> Tensor:
        if self.spec.source != "head":
            return self._activate(self.scores(heads, x))
        call = QueryKey(heads, weight=self.weight, **self.activation._asdict())
        return choose("query_key", backend, call).run(call)[1]

    def _activate(self, scores: Tensor) -> Tensor:
        log_gate = activate(scores, self.activation)
        return log_gate.diagonal(dim1=-2, dim2=-1) if self.spec.source == "diag" else log_gate
