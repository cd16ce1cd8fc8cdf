"""Variants of softmax attention with other numerators and denominators (arXiv 2507.23632), computed with T×T matrices,
for study.

The order of operations is that of the paper's code: q and k are rotated, the numerator's function is applied to them,
and logits are divided by √d and clamped from above. Gates are one number per token and head; in the paper's code the
output gate comes before the norm (gate_order="gate-norm"). The paper's code normalizes the vectors of cosine attention
over the heads per channel; here they are normalized over a head's channels.

Dimensions: B batch, T new tokens, L all tokens so far, D hidden size, H heads, d head dimension.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...extra.averages import divided_by_length
from ...extra.taylor import truncated_exp
from ...layers import build
from ...layers.attention.attention import AttentionState, attend_packed, extended
from ...layers.attention.sdpa import visible
from ...layers.base import ANY, Mixer, check_state
from ...layers.linear.features import FEATURE_MAPS, l2_norm
from ...layers.linear.mixer import LinearMixer
from ...layers.linear.readout import NORM_FLOORS, affine, normalized
from ...layers.maps import mixed
from ...layers.rotary import DEFAULT, angles, rotate
from ...ops.call import NORMALIZER_EPS, accumulator
from ...ops.checks import require
from ...ops.sequences import Sequences
from ...utils.device import without_autocast
from ..specs.softmax_rnn import NORMS, RMS_EPS, SoftmaxRNNSpec

# numerator: (function of q and k, power of d that divides the logits)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "exp": (FEATURE_MAPS["identity"], 0.5),
    "relu": (FEATURE_MAPS["relu"], 0.5),
    "elu+1": (FEATURE_MAPS["elu+1"], 0.5),
    "cosine": (l2_norm, 0.0),
}
# Logarithm of the lower bound of each denominator. As in the paper's code, whose norms are F.normalize, nn.RMSNorm and
# nn.LayerNorm with their default epsilons in float32.
LOG_FLOORS = {
    "detached": 0.0,
    "rms": math.log(RMS_EPS) / 2,
    **{norm: math.log(floor) for norm, floor in NORM_FLOORS.items()},
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
        self.num_heads = num_heads
        # the logits of the output gate, then those of the input gate
        self.gate = nn.Linear(hidden_size, len(spec.gates) * num_heads) if spec.gates else None
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
        projected = (sequences.tokenwise(p, x) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        positions = sequences.positions(None if state is None else state.seen, x)
        turn = angles(positions, DEFAULT, self.rope_theta, self.head_dim)
        q, k = rotate(q, turn), rotate(k, turn)
        gates = self._gates(x, sequences)
        v = v * gates["input"] if "input" in gates else v
        if self.power is not None:
            v = divided_by_length(v, positions + 1 if self.causal else sequences.totals(x), self.power)
        if not sequences.packed:
            state = extended(state, k, v, None, in_place)
            out = self.read(q, *state[:3], gates.get("output"))
        else:
            q = torch.cat([q, gates["output"]], -1) if "output" in gates else q  # what is split with q
            out, state = attend_packed(self._read_packed, q, k, v, state, sequences.counts())
        return sequences.tokenwise(self.o_proj, out.to(x.dtype).flatten(-2)), state

    def _gates(self, x: Tensor, sequences: Sequences) -> dict[str, Tensor]:
        """Returns the gates [B, T, H, 1] by the names of `spec.gates`."""
        if self.gate is None:
            return {}
        logits = sequences.tokenwise(self.gate, x).split(self.num_heads, -1)
        return {name: torch.sigmoid(part)[..., None] for name, part in zip(self.spec.gates, logits, strict=True)}

    def recurrent(self) -> LinearMixer:
        """Returns the mixer of `spec.recurrent()` with a copy of this layer's weights: the same function of any
        sequence, with a state of a fixed size.

        Raises:
            InputError: if there is none.
        """
        D, H, weight = self.q_proj.in_features, self.num_heads, self.q_proj.weight
        settings = {"hidden_size": D, "num_heads": H, "rope_theta": self.rope_theta}
        mixer: Any = build(self.spec.recurrent(), causal=self.causal, **settings).to(weight)
        parts = {name: getattr(self, f"{name}_proj").weight for name in "qkv"}
        with torch.no_grad():
            for name, gate_weight, bias in self._gate_parameters():
                parts[name] = gate_weight
                getattr(mixer, name).bias.copy_(bias)
            mixer.in_proj.weight.copy_(torch.cat([parts[name] for name in mixer.parts]))
            mixer.o_proj.weight.copy_(self.o_proj.weight)
            for name, p in self.named_parameters(recurse=False):
                getattr(mixer, name).copy_(p)
        return mixer

    def _gate_parameters(self) -> list[tuple[str, Tensor, Tensor]]:
        """Returns (its name in a LinearMixer, weight [H, D], bias [H]) of each gate."""
        if self.gate is None:
            return []
        names = [{"output": "gate", "input": "value_gate"}[name] for name in self.spec.gates]
        return list(zip(names, *(p.split(self.num_heads) for p in (self.gate.weight, self.gate.bias)), strict=True))

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """Returns gate · numerator / denominator [B, T, H, d] in the accumulator's precision.

        q [B, T, H, d]; k, v [B, L, H, d]; valid [B, L]: False marks padding; gate [B, T, H, 1]: the output gate."""
        with without_autocast(q):  # which would round the logits before their exponentials
            out, floor = mixed(lambda v: self._attend(q, k, v, valid), v, whole=True)
        if gate is not None and self.spec.gate_order == "gate-norm":
            out, gate = out * gate, None
        out = self._normalized(out, floor)
        return out if gate is None else out * gate

    def _read_packed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`read` of one sequence. q [1, T, H, d], or [1, T, H, d + 1] with the output gate."""
        q, *gate = q.split([self.head_dim] + [1] * (q.shape[-1] - self.head_dim), -1)
        return self.read(q, k, v, None, *gate)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the sum of weighted values [B, T, H, d], over the denominator unless that is a norm, and the lower
        bound [B, T, H, 1] of the norm."""
        allowed = visible(q, k, valid, self.causal)[:, None]
        weights, m = numerator(q, k, self.spec, allowed)
        floor = torch.exp(LOG_FLOORS.get(self.spec.denominator, -math.inf) - m)
        if self.spec.denominator == "sum":
            polynomial = self.spec.order is not None or self.spec.numerator != "exp"  # whose sum can be 0
            weights = weights / (weights.sum(-1, keepdim=True) + NORMALIZER_EPS * polynomial)
        if self.spec.denominator == "detached":
            weights = weights / torch.maximum(weights.sum(-1, keepdim=True), floor).detach()
        if self.spec.by_length:
            weights = weights / allowed.sum(-1, keepdim=True)
        return torch.einsum("bhtl,blhd->bthd", weights, v.to(weights.dtype)), floor.transpose(1, 2)

    def _normalized(self, out: Tensor, floor: Tensor) -> Tensor:
        if self.spec.denominator in NORMS:  # a smaller bound has no finite gradient if all values are 0
            out = normalized(out, self.spec.denominator, floor.clamp(min=1e-12))
        return affine(out, self.norm_weight, self.norm_bias)


def numerator(q: Tensor, k: Tensor, spec: SoftmaxRNNSpec, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weights w e^{−m} of all pairs of tokens [B, H, T, L], and m [B, H, T, 1].

    q [B, T, H, d], k [B, L, H, d], allowed [B or 1, 1, T, L]; weights are 0 where not allowed. If a sum or a norm
    cancels the factor, m is the maximum of the row's logits and of the logarithm of the denominator's lower bound, so
    that neither the weights nor the denominator times e^{−m} can overflow. Otherwise m is 0."""
    function, power = FUNCTIONS[spec.numerator]
    precision = torch.promote_types(accumulator(q), accumulator(k))
    q, k = (function(x.to(precision)) for x in (q, k))
    logits = torch.einsum("bthd,blhd->bhtl", q, k) / q.shape[-1] ** power
    if spec.clamp is not None:
        logits = logits.clamp(max=spec.clamp)
    m = logits.new_zeros(*logits.shape[:-1], 1)
    if spec.order is not None:
        return truncated_exp(logits, spec.order) * allowed, m
    if spec.numerator != "exp":
        return logits * allowed, m
    logits = logits.masked_fill(~allowed, -torch.inf)
    if spec.denominator in ("sum", *LOG_FLOORS) and logits.shape[-1]:  # a maximum needs a key
        m = logits.amax(-1, keepdim=True).detach().clamp(min=LOG_FLOORS.get(spec.denominator, -math.inf))
    return (logits - m).exp(), m
