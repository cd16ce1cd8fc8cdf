"""What a layer with a matrix memory per head is, as data, where the memory changes in a way that the algebra of
`linear_attention` has no words for."""

import math
from dataclasses import dataclass
from typing import Literal

from ..utils.errors import InputError
from .record import PositiveFloat, PositiveInt, Record, require_positive


@dataclass(frozen=True)
class MatrixSpec(Record):
    """S ← A_t S + kᵀ v, with an A_t that is neither a decay per key channel nor that with a delta rule."""

    kind: Literal["rwkv7", "gla-outer"]
    rank: PositiveInt | None = None  # of the low-rank projections; None: what the papers take at this hidden size
    expand_k: PositiveFloat = 1.0
    expand_v: PositiveFloat = 1.0
    count: PositiveInt | None = None  # heads; None: the model's num_heads

    def _objections(self):
        yield (
            self.kind == "rwkv7" and (self.expand_k != 1 or self.expand_v != 1),
            f"kind='rwkv7' has no expand_k and expand_v; got {self.expand_k} and {self.expand_v}",
        )

    def num_heads(self, default: int) -> int:
        return self.count or default

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return []

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """(K, V) per head. Raises InputError where the widths do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H, dims = self.num_heads(num_heads), []
        for name in ("expand_k", "expand_v"):
            width = round(getattr(self, name) * hidden_size, 6)  # 58 / 56 · 56 is not 58 in float64
            if width % H or width < H:
                raise InputError(f"num_heads={H} does not divide {name} · hidden_size = {width:g}")
            dims.append(int(width) // H)
        return dims[0], dims[1]

    def state_shapes(self, hidden_size: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """What one sequence carries from token to token, without the batch dimension."""
        memory = (self.num_heads(num_heads), *self.head_dims(hidden_size, num_heads))
        return {"memory": memory, "shift": (1, hidden_size)} if self.kind == "rwkv7" else {"memory": memory}

    def state_bytes(self, hidden_size: int, num_heads: int, itemsize: int = 4) -> int:
        return itemsize * sum(math.prod(shape) for shape in self.state_shapes(hidden_size, num_heads).values())
