"""Head competition: the gates that heads compute by a softmax over the heads.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.backends.triton import elementwise
from ...ops.call import accumulator
from ...ops.modules import is_plain
from ...spec.linear import Competition
from ..base import SelfInitialized
from .stage import Stage, Tokens, refuse_changes


class Gate(SelfInitialized):
    """Base of the modules that head competition adds to a mixer. The optimizer applies no weight decay to their
    parameters, and retrofitting a trained model initializes only these."""

    @property
    def no_weight_decay(self) -> tuple[str, ...]:
        return tuple(self._parameters)


class HeadCompetition(Gate):
    """Logarithm of one gate per token and head, computed by a softmax over the heads (arXiv 2602.01744, equation 4).

    The source of the scores s_h is: "head", ⟨q_h, w_h⟩; "diag", where the gate is entry h of softmax(q_h W); "query", a
    linear map of all heads' q; "hidden", a linear map of the layer's input. Write gates use k in place of q. Weights
    are initialized to zero, without random numbers. With scale "identity" the gate is divided by its value at zero
    scores, so that the initial layer equals the mixer without competition bit for bit.

    With spec.top_k = k, the gate is 0, and its logarithm −∞, for scores below the k-th largest of the token, and the
    activation is that of the others: a softmax is renormalized over them. All scores that equal the k-th largest are
    kept. Equal scores, as zero weights give them, therefore keep all heads, with gates of 1 under scale "identity".
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

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    @property
    def no_weight_decay(self) -> tuple[str, ...]:
        return () if self.spec.weight_decay else super().no_weight_decay

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
        return (heads[..., None, :] * self.weight.unflatten(0, (heads.shape[-2], -1))).sum(-1).flatten(-2)

    def forward(self, heads: Tensor, x: Tensor, positions: Tensor | None = None, chosen_only: bool = True) -> Tensor:
        """Returns the logarithm of the gate [B, T, H], in the accumulator's precision.

        Args:
            heads, x: as in `scores`.
            positions: [B or 1, T], of each token in its sequence; needed for spec.shuffle only.
            chosen_only: False for the gate without spec.top_k.
        """
        log_gate = self.activate(self.scores(heads, x), chosen_only)
        if self.spec.source == "diag":
            log_gate = log_gate.diagonal(dim1=-2, dim2=-1)
        if positions is None or not self.spec.shuffle:
            return log_gate
        owner = (torch.arange(self.num_heads, device=x.device) + positions[..., None]) % self.num_heads
        return log_gate.gather(-1, owner.expand_as(log_gate))

    def gate(self, heads: Tensor, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns the gate [B, T, H], from the arguments of `forward`. With spec.gradient="all" it has the gradient of
        the gate without spec.top_k (straight-through)."""
        gate = self(heads, x, positions).exp()
        if self.spec.gradient == "chosen":
            return gate
        whole = self.forward(heads, x, positions, chosen_only=False).exp()
        return gate.detach() + (whole - whole.detach())

    def activate(self, scores: Tensor, chosen_only: bool = True) -> Tensor:
        """Returns the logarithm of the gates of scores [..., H]."""
        scores = scores.to(accumulator(scores))
        if self.spec.temperature != 1:  # Inductor makes one more kernel of a softmax after a division
            scores = scores / self.spec.temperature
        k = self.spec.top_k if chosen_only else None
        lost = None if k is None or k >= scores.shape[-1] else scores < scores.topk(k).values[..., -1:]
        log_gate = self._log_activation(scores, lost)
        if self.spec.scale == "identity":  # by the same function, because log(H) may differ in the last bit
            log_gate = log_gate - self._log_activation(scores.new_zeros(scores.shape[-1]))
        return log_gate

    def _log_activation(self, scores: Tensor, lost: Tensor | None = None) -> Tensor:
        """Returns the logarithm of the activation of those scores that are not lost, and −∞ for the others."""
        if self.spec.activation == "sigmoid":
            log_gate = F.logsigmoid(scores - self._offset(scores, lost))
            return log_gate if lost is None else log_gate.masked_fill(lost, -math.inf)
        if lost is not None:
            scores = scores.masked_fill(lost, -math.inf)
        if self.spec.activation == "null":
            return F.log_softmax(F.pad(scores, (0, 1)), -1)[..., :-1]
        return F.log_softmax(scores, -1)

    def _offset(self, scores: Tensor, lost: Tensor | None) -> Any:
        """The score at which a sigmoid is 1/2. A gate of score zero is 1 / range, and for "heads" 1 / n as in a softmax
        over n heads: all of them, or top_k where others are lost."""
        if self.spec.range != "heads":
            return math.log(self.spec.range - 1)
        of_all = _log_of_others(self.num_heads)
        if lost is None:
            return of_all
        of_chosen = scores.new_full((), _log_of_others(self.spec.top_k or 0))
        return torch.where(lost.any(-1, keepdim=True), of_chosen, of_all)


def _log_of_others(n: int) -> float:
    """log(n − 1)."""
    return math.log(n - 1) if n > 1 else -math.inf


def gates_query(spec: Any) -> bool:
    """Whether the recurrence applies the read gate: if the spec puts the gate on q, or if neither norm nor skip
    follows, and not to a sum of weights. Otherwise the gate follows the norm, which would cancel it."""
    read, own_sum = spec.read, spec.sums and spec.read.norm != "sum"
    return not own_sum and (spec.competition.read == "query" or (read.norm in ("none", "sum") and not read.skip))


class Compete(Stage):
    """The gates of head competition."""

    field = "competition"

    def build(self, mixer: Any) -> None:
        gate, sizes = mixer.spec.competition, (mixer.hidden_size, mixer.H, mixer.Hq)
        if gate.read != "none":
            mixer.read_competition = HeadCompetition(gate, *sizes, mixer.K)
        if gate.write != "none":
            width = mixer.spec.write.steps * mixer.K if "k" in mixer.parts else mixer.spec.memory_rows(mixer.K)
            mixer.write_competition = HeadCompetition(gate, *sizes, width, gate.memories_per_head)

    def native(self, mixer: Any) -> dict[str, Any]:
        gate = mixer.spec.competition
        refuse_changes(mixer.spec, "competition.top_k", "competition.shuffle")
        names = {name: getattr(gate, name) for name in ("read", "write", "source", "activation")}
        return names | {"gate_scale": gate.scale}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        gate = mixer.spec.competition
        if gate.read != "none":
            if gates_query(mixer.spec):
                t.read_gate = gates(mixer.read_competition, mixer.backend, t.q, t)
            else:
                t.read = gates(mixer.read_competition, mixer.backend, t.q, t, dtype=t.q.dtype)
        if gate.write != "none":
            t.write = gates(mixer.write_competition, mixer.backend, t.k, t, log=gate.write == "beta")


def gates(module: Any, backend: str, heads: Tensor, t: Tokens, log: bool = False, dtype: Any = torch.float32) -> Tensor:
    """Returns the gates of q or k [B, T, Hq, K], or their logarithms; where one kernel computes them, in this dtype."""
    spec, weight = module.spec, module.weight
    common = (spec.source, spec.activation, spec.top_k, spec.shuffle) == ("head", "softmax", None, False)
    fits = common and is_plain(module, HeadCompetition) and weight.numel() <= elementwise.MOST_WEIGHTS
    if fits and elementwise.computes(backend, heads, in_graphs=True):
        return elementwise.head_gate(heads, weight, 1 / spec.temperature, spec.scale == "identity", log, dtype)
    return (module if log else module.gate)(heads, t.x, t.positions)
