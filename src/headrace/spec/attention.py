"""What a softmax attention layer is, as data: its heads, its positions, and which earlier tokens a token sees."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from ..utils.errors import InputError
from .record import NonNegativeInt, PositiveInt, Range, Record, require_positive


@dataclass(frozen=True)
class Pattern(Record):
    """The tokens seen, when they are not all: the last `window` (the token itself is one of them), the first `first`
    of the sequence, and `random` blocks of those between.

    The random blocks are a reservoir sample: of all blocks that begin to leave the window, each is held with the same
    probability, which lets a sequence without end be decoded with a bounded cache.
    """

    window: PositiveInt
    first: NonNegativeInt = 0
    random: NonNegativeInt = 0
    block: PositiveInt = 16  # tokens of a random block
    seed: int = 0  # of the choice of random blocks; the same for all heads and sequences

    @property
    def far(self) -> int:
        """How many tokens beyond the window can be seen."""
        return self.first + self.random * self.block

    @property
    def slots(self) -> int:
        """How many tokens must be kept to see what the next one sees."""
        return self.far + self.window - 1


@dataclass(frozen=True)
class AttentionSpec(Record):
    """Softmax attention. As it stands, with rotary positions and every earlier token seen: the yardstick."""

    kv_heads: PositiveInt | None = None  # each shared by consecutive query heads; None: as many as query heads
    rotary: bool = True
    count: PositiveInt | None = None  # None: the model's num_heads
    # of distances, with a learned bias per head each (T5), half of them for single distances; None: no bias
    buckets: Annotated[int, Range("at least 4", lambda n: n >= 4)] | None = None
    null: bool = False  # one more logit, of 0, whose value is 0: a head may read nothing
    scale: Literal["key", "one", "half-key"] = "key"  # of the logits: d^-1/2, 1 (T5), (d/2)^-1/2 (Zamba)
    form: Literal["sdpa", "tiles"] = "sdpa"  # tiles: FlashAttention's, written out
    pattern: Pattern | None = None  # None: every earlier token
    bias: bool = False  # of the four projections

    def _objections(self):
        yield (
            self.form == "tiles" and (self.buckets is not None or self.null or self.pattern is not None),
            "form='tiles' knows neither buckets, null nor pattern; expected none of them",
        )

    def num_heads(self, default: int) -> int:
        return self.count or default

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return []

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H = self.num_heads(num_heads)
        if hidden_size % H:
            raise InputError(f"num_heads={H} does not divide hidden_size={hidden_size}")
        if self.kv_heads is not None and H % self.kv_heads:
            raise InputError(f"kv_heads={self.kv_heads} does not divide num_heads={H}")
        if self.rotary and (hidden_size // H) % 2:
            raise InputError(f"rotary=True needs an even head dimension; got {hidden_size // H}")
        return hidden_size // H, hidden_size // H

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> dict[str, tuple[int, ...]]:
        """The key/value cache after `tokens` tokens: it grows with every one of them, unless a pattern bounds it."""
        heads, kept = self.kv_heads or self.num_heads(num_heads), self.pattern.slots if self.pattern else tokens
        K, V = self.head_dims(hidden_size, num_heads)
        return {"k": (kept, heads, K), "v": (kept, heads, V)}

    def state_bytes(self, hidden_size: int, num_heads: int, itemsize: int = 4, tokens: int = 1) -> int:
        sizes = (math.prod(s) for s in self.state_shapes(hidden_size, num_heads, tokens).values())
        return itemsize * sum(sizes)
