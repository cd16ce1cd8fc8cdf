"""Softmax attention taken apart (arXiv 2507.23632): any of several weights of a pair of tokens over any of several
denominators. All are T×T: a form to study, not a fast one.

The order of things is that of the paper's code: q and k rotate, then their functions act, logits are divided by √d and
clamped from above, gates are one number per token and head. Cosine attention differs: there, the norm is over heads.

Dimensions: B batch, T new tokens, L all tokens so far, D hidden size, H heads, d head dimension.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import require
from ..gates import FEATURE_MAPS, l2_norm, rotary
from ..packing import Sequences
from ..recurrence import NORMALISER_EPS, accumulator
from ..softmax_rnn_spec import NORMS, SoftmaxRNNSpec
from .attention import AttentionState, attend_packed, extended
from .base import Mixer
from .sdpa import visible
from .taylor import truncated_exp

# Of q and of k, and what their product is divided by.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], float]]] = {
    "exp": (FEATURE_MAPS["identity"], lambda d: d**0.5),
    "relu": (FEATURE_MAPS["relu"], lambda d: d**0.5),
    "elu+1": (FEATURE_MAPS["elu+1"], lambda d: d**0.5),
    "cosine": (l2_norm, lambda d: 1.0),
}


class SoftmaxRNN(Mixer):
    """Any numerator over any denominator that a SoftmaxRNNSpec names; with those of softmax, the zoo's transformer.

    Args: as LinearMixer's; norm_eps is that of the norm in the denominator's place. causal: False
        for an encoder, whose tokens see all others.
    """

    def __init__(
        self, spec: SoftmaxRNNSpec, *, hidden_size: int, num_heads: int, norm_eps: float = 1e-6,
        rope_theta: float = 10000.0, causal: bool = True, **unused,
    ):  # fmt: skip
        super().__init__()
        self.spec, self.norm_eps, self.rope_theta, self.causal = spec, norm_eps, rope_theta, causal
        self.head_dim = spec.head_dims(hidden_size, num_heads)[0]
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate = nn.Linear(hidden_size, num_heads) if spec.denominator.endswith("gate") else None
        self.norm_weight = nn.Parameter(torch.empty(self.head_dim)) if spec.affine else None
        centred = spec.affine and spec.denominator == "layer"
        self.norm_bias = nn.Parameter(torch.empty(self.head_dim)) if centred else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.norm_weight is not None:
            self.norm_weight.fill_(1)
        if self.norm_bias is not None:
            self.norm_bias.zero_()

    def run(self, x: Tensor, state: AttentionState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, AttentionState]:
        require(self.causal or state is None, "an encoder sees a whole sequence at once; expected state=None")
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        positions = Sequences(x, cu_seqlens).positions(None if state is None else state.seen, x)
        q, k = rotary(q, positions, self.rope_theta), rotary(k, positions, self.rope_theta)
        gate = None if self.gate is None else torch.sigmoid(self.gate(x))[..., None]
        if gate is not None and self.spec.denominator == "input-gate":
            v, gate = v * gate, None
        if cu_seqlens is None:
            state = extended(state, k, v, None)
            out = self._attend(q, *state)
        else:
            out, state = attend_packed(self._attend, q, k, v, state, cu_seqlens.diff().tolist())
        out = self._normalised(out)
        out = out if gate is None else out * gate
        return self.o_proj(out.to(x.dtype).flatten(-2)), state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
        """q [B, T, H, d]; k, v [B, L, H, d] -> [B, T, H, d], in the accumulator's precision."""
        allowed = visible(q, k, valid, self.causal)[:, None]
        weights = numerator(q, k, self.spec, allowed)
        if self.spec.denominator in ("sum", "detached"):
            total = weights.sum(-1, keepdim=True).clamp(min=NORMALISER_EPS)  # zero where no product of relus is not
            weights = weights / (total.detach() if self.spec.denominator == "detached" else total)
        if self.spec.by_length:
            weights = weights / allowed.sum(-1, keepdim=True)
        return torch.einsum("bhtl,blhd->bthd", weights, v.to(weights.dtype))

    def _normalised(self, out: Tensor) -> Tensor:
        kind, size = self.spec.denominator, (self.head_dim,)
        if kind == "l2":
            out = l2_norm(out, self.norm_eps)
        elif kind == "rms":
            out = F.rms_norm(out, size, eps=self.norm_eps)
        elif kind == "layer":
            out = F.layer_norm(out, size, eps=self.norm_eps)
        out = out if self.norm_weight is None else out * self.norm_weight
        return out if self.norm_bias is None else out + self.norm_bias


def numerator(q: Tensor, k: Tensor, spec: SoftmaxRNNSpec, allowed: Tensor) -> Tensor:
    """The weight of every pair of tokens before it is divided, 0 where not allowed: q [B, T, H, d], k [B, L, H, d],
    allowed [B or 1, 1, T, L] -> [B, H, T, L].

    Where a sum or a norm divides out any factor of a row, e^x is e^(x − m), m the row's largest logit."""
    function, divisor = FUNCTIONS[spec.numerator]
    q, k = (function(x.to(accumulator(x))) for x in (q, k))
    logits = torch.einsum("bthd,blhd->bhtl", q, k) / divisor(q.shape[-1])
    if spec.clamp is not None:
        logits = logits.clamp(max=spec.clamp)
    if spec.order is not None:
        return truncated_exp(logits, spec.order) * allowed
    if spec.numerator != "exp":
        return logits * allowed
    logits = logits.masked_fill(~allowed, -torch.inf)
    if spec.denominator in ("sum", "detached", *NORMS):
        logits = logits - logits.amax(-1, keepdim=True).detach()
    return logits.exp()
