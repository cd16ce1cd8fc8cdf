"""The spec of a mixer with a matrix memory per head whose update `linear_attention` cannot express."""

import math
from dataclasses import dataclass
from typing import Literal

from ..utils.errors import InputError
from .record import PositiveFloat, PositiveInt, Ungated, require_positive

PER_NUMBER = {  # operations per number of the memory and token, as `flops_per_token` counts them
    "rwkv7": 9,  # decay: 1; κ S: 2; − (a κ)ᵀ (κ S): 2; + kᵀ v: 2; q S: 2
    "gla-outer": 6,  # both decays: 2; + kᵀ v: 2; q S: 2
}


@dataclass(frozen=True)
class MatrixSpec(Ungated):
    """A mixer with the memory update S ← A_t S + kᵀ v, for a transition A_t that `linear_attention` does not have:
    RWKV-7 (arXiv 2503.14456), or GLA with a decay of keys and values (arXiv 2312.06635)."""

    kind: Literal["rwkv7", "gla-outer"]
    rank: PositiveInt | None = None  # rank of the low-rank projections; None: the papers' rank for the hidden size
    expand_k: PositiveFloat = 1.0  # key dimensions of all heads together, as a multiple of the hidden size
    expand_v: PositiveFloat = 1.0  # value dimensions of all heads together, as a multiple of the hidden size
    count: PositiveInt | None = None  # number of heads; None: the model's num_heads

    def _objections(self):
        yield (
            self.kind == "rwkv7" and (self.expand_k != 1 or self.expand_v != 1),
            f"expand_k={self.expand_k} and expand_v={self.expand_v} with kind='rwkv7'; expected 1 for both",
        )

    def num_heads(self, default: int) -> int:
        """Returns the number of heads, which is `default` unless the spec sets it."""
        return self.count or default

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns (K, V), the key and value dimensions per head. Raises InputError for widths that do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H, dims = self.num_heads(num_heads), []
        for name in ("expand_k", "expand_v"):
            width = round(getattr(self, name) * hidden_size, 6)  # 58 / 56 · 56 is not 58 in float64
            if width % H or width < H:
                raise InputError(f"num_heads={H} does not divide {name} · hidden_size = {width:g}")
            dims.append(int(width) // H)
        return dims[0], dims[1]

    def state_shapes(self, hidden_size: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the recurrent state of one sequence, without the batch dimension."""
        memory = (self.num_heads(num_heads), *self.head_dims(hidden_size, num_heads))
        return {"memory": memory, "shift": (1, hidden_size)} if self.kind == "rwkv7" else {"memory": memory}

    def state_bytes(self, hidden_size: int, num_heads: int, itemsize: int = 4) -> int:
        """Returns the size in bytes of one sequence's recurrent state, with `itemsize` bytes per number."""
        return itemsize * sum(math.prod(shape) for shape in self.state_shapes(hidden_size, num_heads).values())

    def flops_per_token(self, hidden_size: int, num_heads: int) -> int:
        """Returns the floating-point operations per token of the recurrence in its recurrent form, without projections.
        A multiply-add counts as two."""
        return PER_NUMBER[self.kind] * math.prod(self.state_shapes(hidden_size, num_heads)["memory"])
