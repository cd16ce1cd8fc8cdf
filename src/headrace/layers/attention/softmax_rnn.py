"""Variants of softmax attention with other numerators and denominators (arXiv 2507.23632), computed with T×T matrices,
for study.

The order of operations is that of the paper's code: q and k are rotated, the numerator's function is applied to them,
and logits are divided by √d and clamped from above. Gates are one number per token and head. The paper's code
normalises the vectors of cosine attention over the heads per channel; here they are normalised over a head's channels.

Dimensions: B batch, T new tokens, L all tokens so far, D hidden size, H heads, d head dimension.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...ops.call import NORMALISER_EPS, accumulator
from ...ops.checks import require
from ...ops.sequences import Sequences
from ...spec.softmax_rnn import NORMS, SoftmaxRNNSpec
from ..base import ANY, Mixer, check_state
from ..linear.features import FEATURE_MAPS, l2_norm
from ..linear.taylor import truncated_exp
from ..rotary import rotary
from .attention import AttentionState, attend_packed, extended
from .sdpa import visible

# numerator: (function of q and k, divisor of the logits)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], float]]] = {
    "exp": (FEATURE_MAPS["identity"], lambda d: d**0.5),
    "relu": (FEATURE_MAPS["relu"], lambda d: d**0.5),
    "elu+1": (FEATURE_MAPS["elu+1"], lambda d: d**0.5),
    "cosine": (l2_norm, lambda d: 1.0),
}
# Logarithm of the lower bound of each denominator. As in the paper's code, whose norms are F.normalize, nn.RMSNorm and
# nn.LayerNorm with their default epsilons in float32.
LOG_FLOORS = {
    "detached": 0.0,
    "l2": math.log(1e-12),
    "rms": math.log(torch.finfo(torch.float32).eps) / 2,
    "layer": math.log(1e-5) / 2,
}


class SoftmaxRNN(Mixer):
    """The mixer of a SoftmaxRNNSpec. With its defaults it equals the zoo's transformer.

    Args:
        spec, hidden_size, num_heads, rope_theta: as in LinearMixer.
        causal: False for an encoder, in which every token attends to all tokens.
        unused: settings of other mixers. norm_eps is one of them: the denominators' norms use the paper's epsilons.
    """

    state_kind = AttentionState
    fixed_size = False

    def __init__(
        self, spec: SoftmaxRNNSpec, *, hidden_size: int, num_heads: int, rope_theta: float = 10000.0,
        causal: bool = True, **unused,
    ):  # fmt: skip
        super().__init__()
        self.spec, self.rope_theta, self.causal = spec, rope_theta, causal
        self.head_dim = spec.head_dims(hidden_size, num_heads)[0]
        self.state_shapes = spec.state_shapes(hidden_size, num_heads, ANY) | {"valid": (ANY,)}
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate = nn.Linear(hidden_size, num_heads) if spec.denominator.endswith("gate") else None
        self.norm_weight = nn.Parameter(torch.empty(self.head_dim)) if spec.affine else None
        self.power = nn.Parameter(torch.empty(num_heads)) if spec.denominator == "input-length" else None
        centred = spec.affine and spec.denominator == "layer"
        self.norm_bias = nn.Parameter(torch.empty(self.head_dim)) if centred else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.norm_weight is not None:
            self.norm_weight.fill_(1)
        if self.norm_bias is not None:
            self.norm_bias.zero_()
        if self.power is not None:
            self.power.fill_(0.5)

    def run_in_place(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        check_state(state, self.state_kind, self.state_shapes, x, x.shape[0])
        return self.run(x, state, Sequences(x, None), in_place=True)

    def run(
        self, x: Tensor, state: AttentionState | None, sequences: Sequences, in_place: bool = False
    ) -> tuple[Tensor, AttentionState]:
        require(self.causal or state is None, "state is given to an encoder, which has none; expected state=None")
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        positions = sequences.positions(None if state is None else state.seen, x)
        q, k = rotary(q, positions, self.rope_theta), rotary(k, positions, self.rope_theta)
        gate = None if self.gate is None else torch.sigmoid(self.gate(x))[..., None]
        if gate is not None and self.spec.denominator == "input-gate":
            v, gate = v * gate, None
        if self.power is not None:
            seen = positions + 1 if self.causal else sequences.totals(x)
            v = (v / seen[..., None, None].to(accumulator(v)) ** torch.sigmoid(self.power)[:, None]).to(v.dtype)
        if not sequences.packed:
            state = extended(state, k, v, None, in_place)
            out = self.read(q, *state[:3])
        else:
            out, state = attend_packed(self.read, q, k, v, state, sequences.counts())
        out = out if gate is None else out * gate
        return self.o_proj(out.to(x.dtype).flatten(-2)), state

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
        """Returns numerator / denominator [B, T, H, d] in the accumulator's precision, without gates.

        q [B, T, H, d]; k, v [B, L, H, d]; valid [B, L]: False marks padding."""
        return self._normalised(*self._attend(q, k, v, valid))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the sum of weighted values [B, T, H, d], over the denominator unless that is a norm, and the lower
        bound [B, T, H, 1] of the norm."""
        allowed = visible(q, k, valid, self.causal)[:, None]
        weights, m = numerator(q, k, self.spec, allowed)
        floor = torch.exp(LOG_FLOORS.get(self.spec.denominator, -math.inf) - m)
        if self.spec.denominator == "sum":
            weights = weights / weights.sum(-1, keepdim=True).clamp(
                min=NORMALISER_EPS
            )  # all weights can be 0 with relu
        if self.spec.denominator == "detached":
            weights = weights / torch.maximum(weights.sum(-1, keepdim=True), floor).detach()
        if self.spec.by_length:
            weights = weights / allowed.sum(-1, keepdim=True)
        return torch.einsum("bhtl,blhd->bthd", weights, v.to(weights.dtype)), floor.transpose(1, 2)

    def _normalised(self, out: Tensor, floor: Tensor) -> Tensor:
        if self.spec.denominator in NORMS:  # a smaller bound has no finite gradient if all values are 0
            out = normalised(out, self.spec.denominator, floor.clamp(min=1e-12))
        out = out if self.norm_weight is None else out * self.norm_weight
        return out if self.norm_bias is None else out + self.norm_bias


def normalised(x: Tensor, kind: str, floor: Tensor) -> Tensor:
    """Divides x [..., d] by its L2 norm ("l2") or root mean square ("rms"), or centres x and divides it by its standard
    deviation ("layer"). floor [..., 1] bounds the divisor: max(norm, floor) for "l2", else √(norm² + floor²)."""
    if kind == "l2":
        return x / torch.maximum(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + floor.square())


def numerator(q: Tensor, k: Tensor, spec: SoftmaxRNNSpec, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights w e^{−m} of all pairs of tokens [B, H, T, L], and m [B, H, T, 1].

    q [B, T, H, d], k [B, L, H, d], allowed [B or 1, 1, T, L]; weights are 0 where not allowed. If a sum or a norm
    cancels the factor, m is the maximum of the row's logits and of the logarithm of the denominator's lower bound, so
    that neither the weights nor the denominator times e^{−m} can overflow. Otherwise m is 0."""
    function, divisor = FUNCTIONS[spec.numerator]
    precision = torch.promote_types(accumulator(q), accumulator(k))
    q, k = (function(x.to(precision)) for x in (q, k))
    logits = torch.einsum("bthd,blhd->bhtl", q, k) / divisor(q.shape[-1])
    if spec.clamp is not None:
        logits = logits.clamp(max=spec.clamp)
    m = torch.zeros_like(logits[..., :1])
    if spec.order is not None:
        return truncated_exp(logits, spec.order) * allowed, m
    if spec.numerator != "exp":
        return logits * allowed, m
    logits = logits.masked_fill(~allowed, -torch.inf)
    if spec.denominator in ("sum", *LOG_FLOORS):
        m = logits.amax(-1, keepdim=True).detach().clamp(min=LOG_FLOORS.get(spec.denominator, -math.inf))
    return (logits - m).exp(), m
