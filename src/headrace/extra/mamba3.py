"""What Mamba-3 (arXiv 2603.15569) adds to a linear mixer: its decay, the trapezoidal update, rotations by angles of the
token, and the norm of q and k.

Dimensions: B batch, T tokens, H heads (Hq for q and k), K key, V value dimension per head, N sequences, F angles.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.base import SelfInitialized
from ..layers.linear.decays import DECAYS, DecayModule, biased, draw_step_bias_
from ..layers.linear.recur import Recur
from ..layers.linear.stage import STAGES, Stage, Tokens
from ..layers.rotary import rotate
from ..ops.call import accumulator, product
from ..ops.derivatives import apply_function
from ..ops.sequences import Sequences
from ..spec.decay import Decay
from ..spec.linear import RULES, Heads, Inputs, MixerSpec, Read, Write
from ..utils.device import float64
from .registration import register_mixer
from .scan import NAME, Scan

EPS = 1e-5


class SoftplusRateDecay(DecayModule):
    """Mamba-3's decay: log_decay [B, T, H] = −A dt, with A = max(softplus(a), 1e-4) and dt = softplus(z + b) (arXiv
    2603.15569). Since June 2026 the authors' code has 1 + a for a ≥ 0 and 1 / (1 − a) for others in place of
    softplus(a)."""

    kind = "softplus-rate"
    SLOWEST = 1e-4  # rate

    def build(self) -> None:
        self.in_features = 2 * self.num_heads
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))

    def reset_parameters(self) -> None:
        draw_step_bias_(self.dt_bias, self.spec.dt_min, self.spec.dt_max)

    def forward(self, x: Tensor, step_size: bool = False) -> Any:
        """Returns log_decay [B, T, H]; with `step_size` (log_decay, dt [B, T, H]). x: z and a of each head."""
        x, rate = x.unflatten(-1, (self.num_heads, 2)).unbind(-1)
        dt = F.softplus(biased(x, self.dt_bias))
        log_decay = -F.softplus(rate.to(dt)).clamp(min=self.SLOWEST) * dt
        return (log_decay, dt) if step_size else log_decay


DECAYS[SoftplusRateDecay.kind] = SoftplusRateDecay


class BiasedNorm(SelfInitialized):
    """RMSNorm over the channels of q or k, with a weight per channel and a bias per head: [B, T, Hq, K] ->
    [B, T, H, K]."""

    def __init__(self, num_heads: int, key_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, key_dim))  # of q and of k
        self.bias = nn.Parameter(torch.empty(2, num_heads, key_dim))
        self.reset_parameters()

    no_weight_decay = ("weight", "bias")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1)
        self.bias.fill_(1)

    def forward(self, heads: Tensor, which: int) -> Tensor:
        """which: 0 for q, 1 for k."""
        wide = heads.to(accumulator(heads))
        normal = F.rms_norm(wide, wide.shape[-1:], self.weight[which].to(wide), EPS)
        return (normal.repeat_interleave(self.bias.shape[1] // heads.shape[2], 2) + self.bias[which]).to(heads.dtype)


def turned(x: Tensor, dt: Tensor, before: Tensor | None, sequences: Sequences) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns (cosines and sines [B, T, H, F] of the angles Σ_s dt_s π tanh(x_s), the last angles of each sequence
    [N, H, F] in 0..2π).

    The sum is float64, as are the angles of rotary positions; its remainder of one turn has the dtype of dt.

    Args:
        x: [B, T, F], shared by all heads.
        dt: step sizes [B, T, H].
        before: the angles before x [N, H, F]; None: 0.
        sequences: the sequences of x.
    """
    steps = math.pi * torch.tanh(x.to(dt))[:, :, None] * dt[..., None]
    steps, shape = steps.flatten(2), steps.shape
    history = steps.new_zeros(sequences.count, 1, steps.shape[2]) if before is None else before.flatten(1)[:, None]
    first = sequences.positions(None, x)[..., None] == 0
    steps = float64(torch.where(first, steps + sequences.shift(steps, history)[0], steps))
    if sequences.packed:  # nothing of a sequence reaches the next, and time is the first dimension of the scan
        passed = torch.where(first.to(steps.device), 0.0, torch.ones_like(steps))
        total = apply_function(Scan, NAME, passed.transpose(0, 1), steps.transpose(0, 1)).transpose(0, 1)
    else:
        total = steps.cumsum(1)
    total = total.remainder(2 * math.pi).to(dt.dtype).to(dt.device)
    last = sequences.last(total, history.to(total))[:, 0]
    total = total.view(shape)
    return (total.cos(), total.sin()), last.unflatten(1, shape[2:])


def trapezoid(
    share: Tensor, dt: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, history: Tensor | None, sequences: Sequences
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Expresses the trapezoidal update by one write per token, that of the token before:

        S_t = α_t S_{t−1} + (1 − λ_t) dt_t α_t k_{t−1}ᵀ v_{t−1} + λ_t dt_t k_tᵀ v_t = U_t + γ_t k_tᵀ v_t
        U_t = α_t U_{t−1} + α_t (γ_{t−1} + (1 − λ_t) dt_t) k_{t−1}ᵀ v_{t−1}        with γ_t = λ_t dt_t

    Args:
        share: the logits of λ [B, T, H]; H counts the memories of all heads.
        dt, log_decay: step sizes and log α [B, T, H].
        k, v: [B, T, Hq, K] and [B, T, H, V].
        history: k, v and γ of the token before [N, 1, ·]; None: zeros.
        sequences: the sequences of the tokens.

    Returns:
        (γ [B, T, H], k, v and β of the update of U, the next history).
    """
    share = torch.sigmoid(share.to(dt))
    now = share * dt
    tokens = torch.cat([k.flatten(2).to(dt), v.flatten(2).to(dt), now], -1)
    previous, history = sequences.shift(tokens, history)
    k_before, v_before, gamma = previous.split([k.shape[2] * k.shape[3], v.shape[2] * v.shape[3], now.shape[2]], -1)
    beta = log_decay.exp() * (gamma + (1 - share) * dt)
    writes = {"k": k_before.view_as(k).to(k), "v": v_before.view_as(v).to(v), "beta": beta}
    return now, writes, history


class NormWithBias(Stage):
    """The norm of q and k with a weight and a bias."""

    def build(self, mixer: Any) -> None:
        mixer.qk_norm = BiasedNorm(mixer.H, mixer.spec.features(mixer.K))

    def __call__(self, mixer: Any, t: Tokens) -> None:
        t.q, t.k = mixer.qk_norm(t.q, 0), mixer.qk_norm(t.k, 1)


class Turn(Stage):
    """Rotates q and k by angles of the token."""

    splits = False

    def build(self, mixer: Any) -> None:
        mixer.parts["turns"] = mixer.spec.angles(mixer.K)

    def __call__(self, mixer: Any, t: Tokens) -> None:
        turns, t.next["angles"] = turned(t.parts["turns"], t.dt, t.before("angles"), t.sequences)
        t.q, t.k = rotate(t.q, turns), rotate(t.k, turns)


class Trapezoid(Recur):
    """The recurrence of the trapezoidal update."""

    native = Stage.native

    def build(self, mixer: Any) -> None:
        mixer.parts["beta"] = mixer.H

    def __call__(self, mixer: Any, t: Tokens) -> None:
        v = t.v if t.write is None else (t.v * t.write[..., None]).to(t.v.dtype)
        now, writes, t.after["shift"] = trapezoid(t.beta, t.dt, t.log_decay, t.k, v, t.before("shift"), t.sequences)
        tensors = self.tensors(t) | writes | {"write_gate": None}
        out, t.after["memory"] = self.recur(mixer, t, tensors)
        weight = (t.q * t.k).sum(-1).to(now).repeat_interleave(now.shape[2] // t.q.shape[2], 2) * now * mixer.scale
        t.out = out + product(weight, t.read_gate)[..., None] * v


def rules(spec: MixerSpec) -> Iterator[tuple[bool, str]]:
    """Objections to turned keys."""
    inputs, shared_keys = spec.inputs, spec.heads.qk_groups not in (None, spec.heads.count)
    turned_features = inputs.order is not None or spec.write.steps > 1
    yield (
        turned_features or (shared_keys and inputs.qk_norm != "rms-bias"),
        f"inputs.turns={inputs.turns} turns q and k of each head by angles of its own; expected inputs.order=None, "
        "write.steps=1, and heads.qk_groups=None or inputs.qk_norm='rms-bias'",
    )


RULES["inputs.turns"] = rules


STAGES.update({"biased-norm": NormWithBias, "turn": Turn, "trapezoid": Trapezoid})
register_mixer(
    "mamba3",
    MixerSpec(
        Heads(expand_k=4.0, expand_v=2.0, qk_groups=1, width=64),  # state-spaces/mamba, Mamba3
        Inputs(qk_norm="rms-bias", turns=0.5),
        Decay("softplus-rate"),
        Write(beta="trapezoid"),
        Read("none", "silu", scale="one", skip=True),
    ),
    about="Mamba-2 whose update is a trapezoid of two tokens, with q and k normalized, biased and turned by the "
    "tokens.",
    paper="https://arxiv.org/abs/2603.15569",
)
