"""The spec of mixers with one recurrence per channel: state-space models, gated recurrences, and convolutions."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from ...spec.mixer import Facts, Shapes, Spec
from ...spec.record import Factor, Names, PositiveFloat, PositiveInt, Range, require_positive
from ...spec.serialize import TYPES
from ...utils.errors import InputError
from ...utils.tables import Table


class ScanKind(NamedTuple):
    """What a kind of scan is, besides how it is computed."""

    facts: Facts
    fields: tuple[str, ...] = ()  # the fields of ScanSpec that it has, of REQUIRED and OPTIONS
    gated: bool = True
    numbers: int = 1  # of the state per channel, without a state_size
    complex: bool = False  # whether two state numbers are one complex number
    shift: bool = False  # whether the last token is part of the state


KINDS: Table[ScanKind] = Table("scan_kinds")  # which plug-ins have
# Fields that not all kinds have: without and with a default.
REQUIRED = "state_size", "conv"
OPTIONS = "expand", "rank", "norm", "eps", "conv_bias", "bias"


@dataclass(frozen=True)
class ScanSpec(Spec):
    """A mixer that runs one recurrence per channel: Mamba (arXiv 2312.00752), S4 (2111.00396), S4D (2206.11893), RWKV-4
    (2305.13048), Griffin's recurrent block (2402.19427), minGRU or minLSTM (2410.01201), HGRN (2311.04823), or LFM2's
    gated convolution (2511.23404)."""

    kind: Annotated[str, Names(KINDS)]
    state_size: PositiveInt | None = None  # state numbers per channel; in s4 and s4d two of them are one complex number
    # mamba, rg-lru: width of the causal depthwise convolution before the recurrence; short-conv: of the convolution
    conv: Annotated[int, Range("at least 2", lambda n: n >= 2)] | None = None
    expand: Factor = 1.0  # number of channels as a multiple of the hidden size; not in s4, s4d and short-conv
    rank: PositiveInt | None = None  # mamba: rank of the projection to the step size; None: hidden size / 16
    # mamba: whether the projected step size, B and C have RMSNorms with weights (Jamba), or plain ones (Falcon Mamba)
    norm: bool | Literal["plain"] = False
    conv_bias: bool = True  # mamba, rg-lru, short-conv: whether the convolution has a bias
    bias: bool = False  # whether the projections into and out of the channels have biases; not in s4, s4d and rwkv4
    eps: PositiveFloat | None = None  # mamba: of the norms; None: the model's

    table = "scans"
    uncompeting = "has no heads to compete"

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return KINDS[self.kind].gated

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        return KINDS[self.kind].facts

    def _objections(self):
        for name in (*REQUIRED, *OPTIONS):
            value, has = getattr(self, name), name in KINDS[self.kind].fields
            yield not has and value != getattr(ScanSpec, name), f"kind={self.kind!r} has no {name}; got {name}={value}"
            yield has and name in REQUIRED and value is None, f"kind={self.kind!r} needs {name}; got none"
        odd = KINDS[self.kind].complex and (self.state_size or 0) % 2 == 1
        yield odd, f"state_size={self.state_size}; expected a multiple of 2"
        yield self.eps is not None and not self.norm, f"eps={self.eps} is of a norm; expected norm=True or 'plain'"

    def num_heads(self, hidden_size: int, default: int) -> int:
        """Returns 1, since the mixer has no heads."""
        return 1

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns (state numbers per channel, channels). Raises InputError unless expand gives whole channels, of which
        rg-lru has a multiple of num_heads."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        width = round(self.expand * hidden_size, 6)  # 58 / 56 · 56 is not 58 in float64
        if width % 1 or width < 1:
            about = f"expand={self.expand} times hidden_size={hidden_size}"
            raise InputError(f"{about} is {width:g}; expected an integer of at least 1")
        if self.kind == "rg-lru" and width % num_heads:
            raise InputError(f"num_heads={num_heads} does not divide the {width:g} channels of kind='rg-lru'")
        inputs = (self.conv or 1) - 1  # that a convolution remembers
        own = inputs if self.kind == "short-conv" else KINDS[self.kind].numbers
        return self.state_size or own, int(width)

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        size, channels = self.head_dims(hidden_size, num_heads)
        shapes: Shapes = {"memory": (size, channels)}
        if self.conv is not None and self.kind != "short-conv":
            shapes["conv"] = (self.conv - 1, channels)
        if KINDS[self.kind].shift:
            shapes["shift"] = (1, hidden_size)
        return shapes


TYPES["scan"] = ScanSpec
