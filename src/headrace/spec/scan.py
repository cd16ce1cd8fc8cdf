"""What a state-space layer or RWKV-4 is, as data. Each channel has a state of its own, and there are no heads."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from ..utils.errors import InputError
from .record import PositiveFloat, PositiveInt, Range, Record, require_positive

# The fields that mean something to each kind, and must be given; the others must be left alone.
FIELDS: dict[str, set[str]] = {
    "mamba": {"state_size", "conv"},
    "s4": {"state_size"},
    "s4d": {"state_size"},
    "rwkv4": set(),
}


@dataclass(frozen=True)
class ScanSpec(Record):
    """A mixer that runs one small recurrence per channel."""

    kind: Literal["mamba", "s4", "s4d", "rwkv4"]
    state_size: PositiveInt | None = None  # numbers that a channel carries; for s4 and s4d pairs of them are complex
    # width of the causal depthwise convolution before the recurrence
    conv: Annotated[int, Range("at least 2", lambda n: n >= 2)] | None = None
    expand: PositiveFloat = 1.0  # channels of the recurrence over hidden size
    rank: PositiveInt | None = None  # of the projection to mamba's step size; None: hidden size / 16
    norm: bool = False  # of mamba's step sizes, B and C, as they come from their projection (Jamba)

    def _objections(self):
        wanted = FIELDS[self.kind]
        for name in ("state_size", "conv"):
            value = getattr(self, name)
            yield name in wanted and value is None, f"kind={self.kind!r} needs {name}; got none"
            yield name not in wanted and value is not None, f"kind={self.kind!r} has no {name}; got {value}"
        pairs = self.kind in ("s4", "s4d")
        yield pairs and (self.state_size or 0) % 2 == 1, f"state_size={self.state_size}; expected a multiple of 2"
        mamba = self.kind == "mamba"
        yield not mamba and self.expand != 1, f"kind={self.kind!r} has no expand; got {self.expand}"
        yield not mamba and self.rank is not None, f"kind={self.kind!r} has no rank; got {self.rank}"
        yield not mamba and self.norm, f"kind={self.kind!r} has no norm; expected norm=False"

    def num_heads(self, default: int) -> int:
        return 1

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return []

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """(numbers that a channel carries, channels). Raises InputError where expand gives no whole number of them."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        width = round(self.expand * hidden_size, 6)  # 58 / 56 · 56 is not 58 in float64
        if width % 1:
            raise InputError(f"expand={self.expand} times hidden_size={hidden_size} is no whole number of channels")
        return self.state_size or 3, int(width)

    def step_rank(self, hidden_size: int) -> int:
        return self.rank or -(-hidden_size // 16)

    def state_shapes(self, hidden_size: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """What one sequence carries from token to token, without the batch dimension."""
        size, channels = self.head_dims(hidden_size, num_heads)
        shapes: dict[str, tuple[int, ...]] = {"memory": (size, channels)}
        if self.conv is not None:
            shapes["conv"] = (self.conv - 1, channels)
        if self.kind == "rwkv4":
            shapes["shift"] = (1, hidden_size)
        return shapes

    def state_bytes(self, hidden_size: int, num_heads: int, itemsize: int = 4) -> int:
        return itemsize * sum(math.prod(shape) for shape in self.state_shapes(hidden_size, num_heads).values())
