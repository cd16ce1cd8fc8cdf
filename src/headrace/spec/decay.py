"""The decays of linear mixers, as data. layers/linear/decays.py computes them, extra/ some of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

from .record import Names, NonNegativeFloat, PositiveFloat, PositiveInt, Range, Record


class DecayShape(IntEnum):
    """The shapes of log_decay, with the numbers of hr_decay in native/headrace.h."""

    NONE = 0  # None: no decay
    FIXED = 1  # [H]
    SCALAR = 2  # [B, T, H]
    VECTOR = 3  # [B, T, H, K]


class DecayKind(NamedTuple):
    """What the library knows of a decay besides how it is computed."""

    paper: str  # address of the paper that introduced the decay
    shape: DecayShape  # shape of log_decay
    fixed: bool = False  # whether the decay is the same for all tokens


STEPPED = ("softplus", "softplus-rate")  # decays of a step size per head, which may be the write strength too

# A new decay is a row here and a class in layers/linear/decays.py.
DECAYS: dict[str, DecayKind] = {
    "retnet": DecayKind("https://arxiv.org/abs/2307.08621", DecayShape.FIXED, fixed=True),
    "xpos": DecayKind("https://arxiv.org/abs/2212.10554", DecayShape.VECTOR, fixed=True),
    "softplus": DecayKind("https://arxiv.org/abs/2405.21060", DecayShape.SCALAR),
    "sigmoid": DecayKind("https://arxiv.org/abs/2312.06635", DecayShape.VECTOR),
    "exp": DecayKind("https://arxiv.org/abs/2404.05892", DecayShape.VECTOR),
    "softplus-vector": DecayKind("https://arxiv.org/abs/2510.26692", DecayShape.VECTOR),
    "sigmoid-head": DecayKind("https://arxiv.org/abs/2103.02143", DecayShape.SCALAR),
    "softplus-rate": DecayKind("https://arxiv.org/abs/2603.15569", DecayShape.SCALAR),
    "exp-fixed": DecayKind("https://arxiv.org/abs/2404.05892", DecayShape.VECTOR, fixed=True),
    "slopes": DecayKind("https://arxiv.org/abs/2501.08313", DecayShape.FIXED, fixed=True),
}


@dataclass(frozen=True)
class Decay(Record):
    """How the memory decays: retnet, xpos, slopes (Lightning Attention) and exp-fixed (RWKV-5) are the same for all
    tokens; that of the other kinds is computed from the token: softplus (Mamba-2), softplus-rate (Mamba-3), sigmoid
    (GLA), sigmoid-head (one per head), exp (RWKV-6), softplus-vector (KDA)."""

    kind: Annotated[str, Names(("none", *DECAYS))] = "none"
    # rank of the projection to a decay per key channel; None: the key dimension K; full: one matrix (softplus-vector,
    # sigmoid)
    rank: PositiveInt | Literal["full"] | None = None
    # The initial step sizes of softplus decays are log-uniform from dt_min to dt_max. With the defaults, Mamba's, a
    # head forgets half after 0.4 to 700 tokens. Smaller step sizes suit memories that must hold a whole row.
    dt_min: PositiveFloat = 1e-3
    dt_max: PositiveFloat = 1e-1
    # Bounds of all step sizes of the decay softplus; None: no upper bound.
    dt_floor: NonNegativeFloat = 0.0
    dt_ceiling: PositiveFloat | None = None
    # ℓ of the log decay ℓ σ(e^A (x + b)) in place of −e^A softplus(x + b) (softplus-vector), or of the decay
    # e^ℓ + (1 − e^ℓ) σ(x)^(1/temperature) (sigmoid); None: no bound
    lower_bound: Annotated[float, Range("less than 0", lambda x: x < 0)] | None = None
    rate: PositiveFloat = 1.0  # slopes: factor of the slopes, for one that depends on the layer
    temperature: PositiveFloat = 16.0  # sigmoid, sigmoid-head: divides the log decay log σ(x); GLA's is 16

    def projected(self, num_heads: int, key_dim: int) -> int:
        """Returns the number of features that a decay per key channel takes from the token."""
        return num_heads * key_dim if self.rank == "full" else self.rank or key_dim

    @property
    def limited(self) -> bool:
        """Whether the step sizes have bounds."""
        return self.dt_floor > 0 or self.dt_ceiling is not None

    def _objections(self) -> Iterator[tuple[bool, str]]:
        yield self.dt_min > self.dt_max, f"dt_min={self.dt_min} exceeds dt_max={self.dt_max}; expected at most that"
        own = (self.dt_min, self.dt_max) == (Decay.dt_min, Decay.dt_max)
        yield (
            not (own or self.kind.startswith("softplus")),
            f"dt_min={self.dt_min} and dt_max={self.dt_max} are step sizes, which decay.kind={self.kind!r} does not "
            "have; expected 'softplus', 'softplus-rate' or 'softplus-vector'",
        )
        high = self.dt_ceiling
        yield high is not None and self.dt_floor > high, f"dt_floor={self.dt_floor} exceeds dt_ceiling={high}"
        yield from (
            (
                self.kind not in kinds and value,
                f"decay.{name} is of decay.kind={' or '.join(map(repr, kinds))}; got decay.kind={self.kind!r}",
            )
            for name, kinds, value in (
                ("dt_floor and dt_ceiling", ("softplus",), self.limited),
                ("lower_bound", ("softplus-vector", "sigmoid"), self.lower_bound is not None),
                ("rank='full'", ("softplus-vector", "sigmoid"), self.rank == "full"),
                ("rate", ("slopes",), self.rate != 1),
                ("temperature", ("sigmoid", "sigmoid-head"), self.temperature != Decay.temperature),
            )
        )
