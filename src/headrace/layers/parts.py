"""The parts of a linear mixer: feature maps, norms, decays, head competition, token shift and output gates.

Each table maps a kind of spec/linear.py to a function or a module. The model initialises linear layers; modules with an
initialisation of their own have `reset_parameters`.

Dimensions: B batch, T tokens, D hidden size, H heads (Hq for q and k), K key, V value dimension per head.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.call import accumulator
from ..spec.linear import Competition, Decay


def dpfp(x: Tensor, shifts: int) -> Tensor:
    """The deterministic parameter-free projection of arXiv 2102.11174, section 5.3: [..., K] -> [..., 2 K · shifts].

    With r = relu([x, −x]), the features are the products of r and r rolled by 1, …, `shifts` positions."""
    r = F.relu(torch.cat([x, -x], -1))
    return torch.cat([r * r.roll(-i, -1) for i in range(1, shifts + 1)], -1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "silu": F.silu,
    "dpfp-1": partial(dpfp, shifts=1),
    "dpfp-2": partial(dpfp, shifts=2),
    "dpfp-3": partial(dpfp, shifts=3),
}


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Returns x / sqrt(|x|² + eps) over the last dimension."""
    wide = x.to(accumulator(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def sum_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Returns x / (Σ x + eps) over the last dimension, for x ≥ 0. The result has |x|² ≤ 1."""
    wide = x.to(accumulator(x))
    return (wide / (wide.sum(-1, keepdim=True) + eps)).to(x.dtype)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "l2": l2_norm, "sum": sum_norm}


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Applies rotary position embeddings to x [B, T, heads, K] at positions [B or 1, T] (arXiv 2104.09864).

    Channel i is paired with channel i + K/2. Angles are float64: a float32 angle is off by 0.004 at position 100000."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions[..., None, None].double() * frequency
    cos, sin = angle.cos().to(accumulator(x)), angle.sin().to(accumulator(x))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class SelfInitialised(nn.Module):
    """A module that initialises its own parameters in `reset_parameters`."""

    def reset_parameters(self) -> None:
        """Initialises the module's own parameters and buffers, without those of its submodules."""
        raise TypeError(f"{type(self).__name__} does not define reset_parameters")


# --- decays: modules from their part x [B, T, in_features] of the input projection to log_decay ≤ 0; depth is the
# --- layer's relative depth, 0 for the first and 1 for the last layer


class FixedDecay(nn.Module):
    """RetNet's decay: log_decay [H] = log(1 − 2^(−5−h)) (arXiv 2307.08621, section 2.2)."""

    def __init__(self, spec: Decay, num_heads: int, key_dim: int, depth: float):
        super().__init__()
        self.in_features, self.num_heads = 0, num_heads

    def forward(self, x: Tensor) -> Tensor:
        # Computed instead of stored, because a half-precision buffer would lose most digits.
        h = torch.arange(self.num_heads, device=x.device, dtype=torch.float64)
        return torch.log1p(-torch.exp2(-5 - h)).to(accumulator(x))


class XPosDecay(nn.Module):
    """The decay of xPos: log_decay [B, T, H, K] = log(ζ_i) / 512, with ζ_i = (i / (K/2) + 0.4) / 1.4 for the rotary
    pair of channels i and i + K/2 (arXiv 2212.10554, section 3).

    xPos multiplies q at position n by ζ^{n/512} and k at position m by ζ^{−m/512}, which overflows for long sequences.
    Their product ζ^{(n−m)/512} is a decay. xPos replaces RetNet's decay γ; both together would decay twice."""

    OFFSET, TOKENS = 0.4, 512

    def __init__(self, spec: Decay, num_heads: int, key_dim: int, depth: float):
        super().__init__()
        self.in_features, self.shape = 0, (num_heads, key_dim)

    def forward(self, x: Tensor) -> Tensor:
        half = self.shape[1] // 2
        zeta = (torch.arange(half, device=x.device, dtype=torch.float64) / half + self.OFFSET) / (1 + self.OFFSET)
        return (zeta.log() / self.TOKENS).repeat(2).to(accumulator(x)).expand(*x.shape[:2], *self.shape)


class SoftplusDecay(SelfInitialised):
    """Decay of Mamba-2 (arXiv 2405.21060) and Gated DeltaNet: log_decay [B, T, H] = −A dt, dt = softplus(x + b)."""

    def __init__(self, spec: Decay, num_heads: int, key_dim: int, depth: float):
        super().__init__()
        self.in_features = num_heads
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.uniform_(1, 16).log_()
        draw_step_bias_(self.dt_bias)

    def step_size(self, x: Tensor) -> Tensor:
        """Returns dt [B, T, H]."""
        acc = accumulator(x)
        return F.softplus(x.to(acc) + self.dt_bias.to(acc))

    def decay(self, dt: Tensor) -> Tensor:
        """Returns log_decay [B, T, H] for the step sizes dt [B, T, H]."""
        return -self.A_log.to(dt.dtype).exp() * dt

    def forward(self, x: Tensor) -> Tensor:
        return self.decay(self.step_size(x))


@torch.no_grad()
def draw_step_bias_(bias: Tensor, low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4) -> None:
    """Mamba's initialisation: sets the bias to softplus⁻¹(dt), with dt log-uniform between low and high."""
    dt = bias.uniform_(math.log(low), math.log(high)).exp().clamp(min=floor)
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


class SigmoidDecay(nn.Module):
    """GLA's decay: log_decay [B, T, H, K] = log σ(W x + b) / 16 (arXiv 2312.06635, section 4.3)."""

    TEMPERATURE = 16.0

    def __init__(self, spec: Decay, num_heads: int, key_dim: int, depth: float):
        super().__init__()
        self.shape, self.in_features = (num_heads, key_dim), spec.rank or key_dim
        self.up = nn.Linear(self.in_features, num_heads * key_dim)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.up(x).to(accumulator(x))
        return (F.logsigmoid(logits) / self.TEMPERATURE).unflatten(-1, self.shape)


class ExpDecay(SelfInitialised):
    """RWKV-6's decay: log_decay [B, T, H, K] = −exp(b + tanh(x) W) (arXiv 2404.05892, section 4.2)."""

    def __init__(self, spec: Decay, num_heads: int, key_dim: int, depth: float):
        super().__init__()
        self.shape, self.in_features = (num_heads, key_dim), spec.rank or key_dim
        self.bias = nn.Parameter(torch.empty(num_heads * key_dim))
        self.up = nn.Parameter(torch.empty(self.in_features, num_heads * key_dim))
        self.depth = depth
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        n = self.bias.numel()
        place = torch.arange(n) / max(n - 1, 1)
        self.bias.copy_(-6 + 5 * place ** (0.7 + 1.3 * self.depth))
        self.up.uniform_(-0.01, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.bias + torch.tanh(x) @ self.up
        return -logits.to(accumulator(x)).exp().unflatten(-1, self.shape)


class SoftplusVectorDecay(SelfInitialised):
    """Decay of Kimi Delta Attention (arXiv 2510.26692): log_decay [B, T, H, K] = −A softplus(W x + b), A per head."""

    def __init__(self, spec: Decay, num_heads: int, key_dim: int, depth: float):
        super().__init__()
        self.shape, self.in_features = (num_heads, key_dim), spec.rank or key_dim
        self.up = nn.Linear(self.in_features, num_heads * key_dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads * key_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.A_log.uniform_(1, 16).log_()
        draw_step_bias_(self.dt_bias)

    def forward(self, x: Tensor) -> Tensor:
        acc = accumulator(x)
        dt = F.softplus(self.up(x).to(acc) + self.dt_bias.to(acc)).unflatten(-1, self.shape)
        return -self.A_log.to(acc).exp()[:, None] * dt


DECAYS: dict[str, Callable[..., nn.Module]] = {
    "retnet": FixedDecay,
    "xpos": XPosDecay,
    "softplus": SoftplusDecay,
    "sigmoid": SigmoidDecay,
    "exp": ExpDecay,
    "softplus-vector": SoftplusVectorDecay,
}


# --- head competition ------------------------------------------------------------------------------------------------


class Gate(SelfInitialised):
    """Base of the modules that head competition adds to a mixer. The optimiser applies no weight decay to their
    parameters, and retrofitting a trained model initialises only these."""


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
        shapes = {
            "head": (num_heads, key_dim),
            "diag": (key_dim, num_heads),
            "query": (num_heads, key_heads * key_dim),
            "hidden": (num_heads, hidden_size),
        }
        self.weight = nn.Parameter(torch.zeros(shapes[spec.source]))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

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
        heads = heads.repeat_interleave(self.num_heads // heads.shape[-2], -2)
        return heads @ self.weight if self.spec.source == "diag" else (heads * self.weight).sum(-1)

    def forward(self, heads: Tensor, x: Tensor) -> Tensor:
        """Returns the logarithm of the gate [B, T, H]. Arguments as in `scores`."""
        scores = self.scores(heads, x)
        scores = scores.to(accumulator(scores)) / self.spec.temperature
        log_gate = self._activate(scores)
        if self.spec.source == "diag":
            log_gate = log_gate.diagonal(dim1=-2, dim2=-1)
        if self.spec.scale == "one":
            return log_gate
        # Computed with the same function, because log(num_heads) may differ in the last bit.
        return log_gate - self._activate(scores.new_zeros(self.num_heads))

    def _activate(self, scores: Tensor) -> Tensor:
        if self.spec.activation == "sigmoid":
            return F.logsigmoid(scores)
        if self.spec.activation == "null":
            return F.log_softmax(F.pad(scores, (0, 1)), -1)[..., :-1]
        return F.log_softmax(scores, -1)


# --- token shift -----------------------------------------------------------------------------------------------------


class TokenShift(SelfInitialised):
    """RWKV-6's ddlerp (arXiv 2404.05892, section 4.1): five mixes of each token with the previous token, by learned,
    data-dependent weights. `STREAMS` names the inputs that the mixes are for."""

    STREAMS = ("decay", "k", "v", "q", "gate")

    def __init__(self, hidden_size: int, depth: float, height: float, rank: int = 32):
        super().__init__()
        self.depth, self.height = depth, height  # relative distance from the first and from the last layer, in 0..1
        self.base = nn.Parameter(torch.empty(hidden_size))
        self.offset = nn.Parameter(torch.empty(len(self.STREAMS), hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, len(self.STREAMS) * rank))
        self.up = nn.Parameter(torch.empty(len(self.STREAMS), rank, hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        place = torch.arange(self.base.numel()) / self.base.numel()
        keep = 1 - place**self.height
        half = 1 - place ** (self.height / 2)
        self.base.copy_(keep)
        self.offset.copy_(torch.stack([keep, keep, keep - 0.3 * self.depth, half, half]))
        self.down.zero_()
        self.up.uniform_(-0.01, 0.01)

    def forward(self, x: Tensor, before: Tensor) -> dict[str, Tensor]:
        """Returns a mix [B, T, D] for each stream. before [B, T, D]: the token before each token of x [B, T, D]."""
        change = before - x
        low = torch.tanh((x + change * self.base) @ self.down).unflatten(-1, (len(self.STREAMS), -1))
        weights = self.offset + torch.einsum("btsr,srd->btsd", low, self.up)
        return dict(zip(self.STREAMS, (x[..., None, :] + change[..., None, :] * weights).unbind(-2), strict=True))


# --- output gates -----------------------------------------------------------------------------------------------------


class OutputGate(nn.Module):
    """Output gate: maps its part [B, T, in_features] of the input projection to [B, T, H, V]. Low-rank gates have rank
    V."""

    def __init__(self, kind: str, num_heads: int, value_dim: int):
        super().__init__()
        self.num_heads, low_rank = num_heads, kind.endswith("low-rank")
        self.activation = F.silu if kind == "silu" else torch.sigmoid
        self.in_features = value_dim if low_rank else num_heads * value_dim
        self.up = nn.Linear(value_dim, num_heads * value_dim) if low_rank else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.up(x)).unflatten(-1, (self.num_heads, -1))
