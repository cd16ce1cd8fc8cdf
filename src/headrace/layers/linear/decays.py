"""The decays of linear mixers, one class each. spec/decay.py declares their shapes and papers.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.backends.native.program import UnsupportedError
from ...ops.backends.triton import elementwise
from ...ops.backends.triton.elementwise import FAR, ROOM
from ...ops.call import accumulator
from ...spec.decay import Decay
from ...utils.device import float64, kept
from ...utils.tables import Table
from ..base import SelfInitialized
from .stage import Stage, Tokens, refuse_changes


class DecayModule(SelfInitialized):
    """Base of the decays: maps its part [B, T, in_features] of the input projection to log_decay ≤ 0, in the
    accumulator's precision.

    Args:
        spec: the decay's kind and rank.
        num_heads, key_dim: H and K.
        depth: relative depth of the layer, 0 for the first and 1 for the last layer.
    """

    kind: ClassVar[str]  # its name in spec/decay.py
    quantizable = False  # by `quantize`: the state multiplies by the result at every token
    starts_fixed: ClassVar[bool] = False  # whether its part of the input projection is initialized to zero
    takes_backend: ClassVar[bool] = False  # whether `forward` does
    in_features: int = 0  # size of its part of the input projection

    def __init__(self, spec: Decay, num_heads: int, key_dim: int, depth: float):
        super().__init__()
        self.spec, self.num_heads, self.key_dim, self.depth = spec, num_heads, key_dim, depth
        self.build()
        self.reset_parameters()

    def build(self) -> None:
        """Adds modules and parameters, and sets `in_features`; the default has none."""

    def reset_parameters(self) -> None:
        """Initializes the parameters of the module itself; the default has none."""

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H K] -> [B, T, H, K]."""
        return x.unflatten(-1, (self.num_heads, self.key_dim))


def finite_exp(x: Tensor, room: float = 8) -> Tensor:
    """Returns e^x for the rate of a decay, at most e^−room of the dtype's largest number, which is e^88 for float32. A
    memory that decays at a rate of e^60 keeps nothing after one token, and ∞ · 0 would be NaN, also in a gradient."""
    return x.clamp(max=math.log(torch.finfo(x.dtype).max) - room).exp()


def biased(x: Tensor, bias: Tensor) -> Tensor:
    """Returns x [B, T, ·] + bias, which is in one dimension, in the accumulator's precision."""
    acc = accumulator(x)
    return x.to(acc) + bias.to(acc).view(x.shape[2:])


def softplus_decay(z: Tensor, log_rate: Tensor) -> Tensor:
    """Returns −e^log_rate softplus(z) for z [B, T, H] or [B, T, H, K] and log_rate [H], finite for all z and rates."""
    log_rate = log_rate.to(z.dtype).view(-1, *[1] * (z.dim() - 3))
    # e^A softplus(z) = e^(A − d) softplus(z + d) below FAR, where softplus is e^z: a product of two factors of which
    # neither is infinite and the second is never 0. A clamp in place of z + d would have no gradient at FAR itself in
    # PyTorch from 2.15 on.
    d = F.relu(FAR - z)
    return -finite_exp(log_rate - d, ROOM) * F.softplus(z + d)


def log_sigmoid(x: Tensor, temperature: float, backend: str) -> Tensor:
    """Returns log σ(x) / temperature for x [B, T, H, K], in the accumulator's precision."""
    if elementwise.computes(backend, x):
        return elementwise.SoftplusDecay.apply(x, None, None, -1.0, -math.log(temperature))
    return F.logsigmoid(x.to(accumulator(x))) / temperature


@kept
def fixed_decay(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    heads = float64(torch.arange(num_heads, device=device))
    return torch.log1p(-torch.exp2(-5 - heads)).to(dtype).to(device)


class FixedDecay(DecayModule):
    """RetNet's decay: log_decay [H] = log(1 − 2^(−5−h)) (arXiv 2307.08621, section 2.2)."""

    kind = "retnet"

    def forward(self, x: Tensor) -> Tensor:
        # Computed instead of stored, because a half-precision buffer would lose most digits.
        return fixed_decay(self.num_heads, accumulator(x), x.device)


class SoftplusDecay(DecayModule):
    """Decay of Mamba-2 (arXiv 2405.21060) and Gated DeltaNet: log_decay [B, T, H] = −A dt, dt = softplus(x + b), which
    the spec may bound. A begins between 1 and 16, as in Mamba-2; in the code of Gated DeltaNet, between 0 and 16."""

    kind, takes_backend = "softplus", True

    def build(self) -> None:
        self.in_features = self.num_heads
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.uniform_(1, 16).log_()
        draw_step_bias_(self.dt_bias, self.spec.dt_min, self.spec.dt_max)

    def forward(self, x: Tensor, backend: str = "auto", step_size: bool = False) -> Any:
        """Returns log_decay [B, T, H]; with `step_size` (log_decay, dt [B, T, H])."""
        spec = self.spec
        if not spec.limited and elementwise.computes(backend, x):
            log_decay = elementwise.head_decay(x, self.dt_bias, self.A_log)
            return (log_decay, -elementwise.head_decay(x, self.dt_bias, None)) if step_size else log_decay
        z = biased(x, self.dt_bias)
        dt = F.softplus(z)
        if spec.limited:
            dt = dt.clamp(spec.dt_floor, spec.dt_ceiling)
            log_decay = -finite_exp(self.A_log.to(z.dtype), ROOM) * dt
        else:
            log_decay = softplus_decay(z, self.A_log)
        return (log_decay, dt) if step_size else log_decay


@torch.no_grad()
def draw_step_bias_(bias: Tensor, low: float = 1e-3, high: float = 1e-1) -> None:
    """Mamba's initialization: sets the bias to softplus⁻¹(dt), with dt log-uniform between low and high."""
    dt = bias.uniform_(math.log(low), math.log(high)).exp()
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


class SigmoidDecay(DecayModule):
    """GLA's decay: log_decay [B, T, H, K] = log σ(W x + b) / temperature, 16 in GLA (arXiv 2312.06635, section 4.4);
    with a lower bound ℓ, log(e^ℓ + (1 − e^ℓ) σ(W x + b)^(1/temperature)), HGRN2's (arXiv 2404.07904)."""

    kind, takes_backend = "sigmoid", True

    def build(self) -> None:
        self.in_features = self.spec.projected(self.num_heads, self.key_dim)
        full = self.spec.rank == "full"
        self.up = nn.Identity() if full else nn.Linear(self.in_features, self.num_heads * self.key_dim)

    def forward(self, x: Tensor, backend: str = "auto") -> Tensor:
        logits, bound = self._heads(self.up(x)), self.spec.lower_bound
        log_decay = log_sigmoid(logits, self.spec.temperature, backend)
        if bound is None:
            return log_decay
        return torch.logaddexp(log_decay.new_tensor(bound), log_decay + math.log(-math.expm1(bound)))


class SigmoidHeadDecay(DecayModule):
    """One forget gate per head: log_decay [B, T, H] = log σ(x + b) / temperature (arXiv 2103.02143, section 3.2)."""

    kind = "sigmoid-head"
    FIRST = 3.0, 6.0  # logits of the first decays: a head then forgets half after 14 to 280 tokens

    def build(self) -> None:
        self.in_features = self.num_heads
        self.bias = nn.Parameter(torch.empty(self.num_heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        gate = self.spec.temperature * F.logsigmoid(torch.linspace(*self.FIRST, self.num_heads))  # its log σ
        self.bias.copy_(gate - torch.log(-torch.expm1(gate)))

    def forward(self, x: Tensor) -> Tensor:
        return F.logsigmoid(biased(x, self.bias)) / self.spec.temperature


class SoftplusVectorDecay(DecayModule):
    """Decay of Kimi Delta Attention (arXiv 2510.26692): log_decay [B, T, H, K] = −A softplus(W x + b), A per head; with
    a lower bound ℓ, ℓ σ(A (W x + b))."""

    kind, takes_backend = "softplus-vector", True

    def build(self) -> None:
        self.in_features = self.spec.projected(self.num_heads, self.key_dim)
        full = self.spec.rank == "full"
        self.up = nn.Identity() if full else nn.Linear(self.in_features, self.num_heads * self.key_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads * self.key_dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.uniform_(1, 16).log_()
        if self.spec.lower_bound is not None:  # at A = 1, ℓ σ(b) is nearly ℓ dt
            self.A_log.zero_()
        draw_step_bias_(self.dt_bias, self.spec.dt_min, self.spec.dt_max)

    def forward(self, x: Tensor, backend: str = "auto") -> Tensor:
        z, bound = self._heads(self.up(x)), self.spec.lower_bound
        if bound is None and elementwise.computes(backend, z):
            return elementwise.SoftplusDecay.apply(z, self.dt_bias, self.A_log)
        z = biased(z, self.dt_bias)
        if bound is None:
            return softplus_decay(z, self.A_log)
        return bound * torch.sigmoid(finite_exp(self.A_log.to(z.dtype), ROOM)[:, None] * z)


class Decays(Stage):
    """log_decay, and the step size dt if more depends on it."""

    field = "decay.kind"

    def build(self, mixer: Any) -> None:
        spec = mixer.spec
        mixer.decay = DECAYS[spec.decay.kind](spec.decay, mixer.H, spec.memory_rows(mixer.K), mixer.depth)
        mixer.parts["decay"] = mixer.decay.in_features

    def reset(self, mixer: Any) -> None:
        if mixer.decay.starts_fixed:
            mixer.part("decay").zero_()

    def native(self, mixer: Any) -> dict[str, Any]:
        names = "dt_floor", "dt_ceiling", "lower_bound", "temperature"
        refuse_changes(mixer.spec, *(f"decay.{name}" for name in names))
        if mixer.spec.decay.rank == "full":
            raise UnsupportedError("it does not support decay.rank='full'")
        return {"decay": mixer.spec.decay.kind}

    def __call__(self, mixer: Any, t: Tokens) -> None:
        steps, options = mixer.spec.step_size, {"backend": mixer.backend} if mixer.decay.takes_backend else {}
        options |= {"step_size": True} if steps else {}
        found = t.sequences.tokenwise(mixer.decay, t.parts["decay"], **options)
        t.log_decay, t.dt = found if steps else (found, None)


DECAYS: Table[type[DecayModule]] = Table("decays", {decay.kind: decay for decay in DecayModule.__subclasses__()})
