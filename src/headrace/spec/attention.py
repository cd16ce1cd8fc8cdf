"""The spec of a softmax attention layer: its heads, its positions and its sparsity pattern."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..utils.errors import InputError
from .mixer import Facts, Shapes, Spec
from .record import NonNegativeInt, PositiveInt, Range, Record, require_positive


@dataclass(frozen=True)
class Pattern(Record):
    """A sparse attention pattern: each token attends to a window of recent tokens, the first tokens of the sequence,
    and random blocks of the tokens between.

    The random blocks are a reservoir sample: every block that leaves the window is kept with the same probability, so
    that the cache has a fixed size for sequences of any length.
    """

    window: PositiveInt  # number of recent tokens, including the token itself
    first: NonNegativeInt = 0  # number of tokens at the start of the sequence
    random: NonNegativeInt = 0  # number of random blocks
    block: PositiveInt = 16  # tokens per random block
    seed: int = 0  # seed of the random blocks, which are the same for all heads and sequences

    @property
    def far(self) -> int:
        """Largest number of tokens outside the window that a token attends to."""
        return self.first + self.random * self.block

    @property
    def slots(self) -> int:
        """Number of earlier tokens in the cache."""
        return self.far + self.window - 1


@dataclass(frozen=True)
class AttentionSpec(Spec):
    """Softmax attention (arXiv 1706.03762). The defaults are causal, with rotary positions, over all earlier tokens."""

    kv_heads: PositiveInt | None = (
        None  # number of k/v heads, shared by consecutive query heads; None: one per query head
    )
    rotary: bool = True  # whether q and k get rotary position embeddings
    count: PositiveInt | None = None  # number of query heads; None: the model's num_heads
    # number of distance buckets of T5's relative position bias, half of them for single distances; None: no bias
    buckets: Annotated[int, Range("at least 4", lambda n: n >= 4)] | None = None
    null: bool = False  # whether the softmax has one more logit 0 with value 0, so that a head can attend to nothing
    scale: Literal["key", "one", "half-key"] = "key"  # factor of the logits: d^-1/2, 1 (T5), (d/2)^-1/2 (Zamba)
    form: Literal["sdpa", "tiles"] = "sdpa"  # PyTorch's attention, or FlashAttention's tiles in plain PyTorch
    pattern: Pattern | None = None  # sparsity pattern; None: all earlier tokens
    bias: bool = False  # whether the projections of q, k, v and the output have biases

    facts = Facts("attention.attention.SoftmaxAttention", cached=True)

    def _objections(self):
        yield (
            self.form == "tiles" and (self.buckets is not None or self.null or self.pattern is not None),
            "form='tiles' supports neither buckets, null nor pattern; expected none of them, or form='sdpa'",
        )

    def num_heads(self, default: int) -> int:
        """Returns the number of query heads, which is `default` unless the spec sets it."""
        return self.count or default

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns the key and value dimensions per head. Raises InputError for sizes that do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H = self.num_heads(num_heads)
        if hidden_size % H:
            raise InputError(f"num_heads={H} does not divide hidden_size={hidden_size}")
        if self.kv_heads is not None and H % self.kv_heads:
            raise InputError(f"kv_heads={self.kv_heads} does not divide num_heads={H}")
        if self.rotary and (hidden_size // H) % 2:
            raise InputError(f"rotary=True needs an even head dimension; got {hidden_size // H}")
        return hidden_size // H, hidden_size // H

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of one sequence's key/value cache after `tokens` tokens; a pattern bounds its length."""
        heads, kept = self.kv_heads or self.num_heads(num_heads), self.pattern.slots if self.pattern else tokens
        K, V = self.head_dims(hidden_size, num_heads)
        return {"k": (kept, heads, K), "v": (kept, heads, V)}
