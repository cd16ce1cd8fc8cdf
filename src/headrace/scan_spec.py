"""What a state-space layer or RWKV-4 is, as data. Each channel has a state of its own, and there are no heads."""

import math
from dataclasses import dataclass
from typing import Literal

from .errors import InputError

# The fields that mean something to each kind, and must be given; the others must be left alone.
FIELDS: dict[str, set[str]] = {
    "mamba": {"state_size", "conv"},
    "s4": {"state_size"},
    "s4d": {"state_size"},
    "rwkv4": set(),
}


@dataclass(frozen=True)
class ScanSpec:
    """A mixer that runs one small recurrence per channel."""

    kind: Literal["mamba", "s4", "s4d", "rwkv4"]
    state_size: int | None = None  # numbers that a channel carries; for s4 and s4d pairs of them are complex
    conv: int | None = None  # width of the causal depthwise convolution before the recurrence
    expand: float = 1.0  # channels of the recurrence over hidden size
    rank: int | None = None  # of the projection to mamba's step size; None: hidden size / 16
    norm: bool = False  # of mamba's step sizes, B and C, as they come from their projection (Jamba)

    def __post_init__(self) -> None:
        for condition, reason in self._objections():
            if condition:
                raise InputError(reason)

    def _objections(self):
        wanted = FIELDS[self.kind]
        for name in ("state_size", "conv"):
            value = getattr(self, name)
            yield name in wanted and value is None, f"kind={self.kind!r} needs {name}; got none"
            yield name not in wanted and value is not None, f"kind={self.kind!r} has no {name}; got {value}"
        least = {"mamba": 1, "s4": 2, "s4d": 2, "rwkv4": 0}[self.kind]
        size = self.state_size or 0
        yield size < least or size % max(least, 1), f"state_size={size}; expected a positive multiple of {least}"
        yield self.conv is not None and self.conv < 2, f"conv={self.conv}; expected a width of at least 2"
        mamba = self.kind == "mamba"
        yield not mamba and self.expand != 1, f"kind={self.kind!r} has no expand; got {self.expand}"
        yield not mamba and self.rank is not None, f"kind={self.kind!r} has no rank; got {self.rank}"
        yield not mamba and self.norm, f"kind={self.kind!r} has no norm; expected norm=False"
        yield self.expand <= 0, f"expand={self.expand}; expected a positive number"
        yield self.rank is not None and self.rank < 1, f"rank={self.rank}; expected at least 1"

    def num_heads(self, default: int) -> int:
        return 1

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return []

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """(numbers that a channel carries, channels). Raises InputError where expand gives no whole number of them."""
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
