"""The spec of a softmax attention layer: its heads, its positions and its sparsity pattern."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..utils.errors import InputError
from .mixer import Facts, Shapes, Spec
from .record import NonNegativeInt, PositiveInt, Range, Record, require_positive


@dataclass(frozen=True)
class Pattern(Record):
    """A sparse attention pattern: each token attends to a window, the first tokens of the sequence, and random blocks.

    In a causal layer, whose form of the pattern is ours, the window is the last `window` tokens, including the token
    itself. The random blocks are a reservoir sample of the tokens before the window: every block that leaves the window
    is kept with the same probability, so that the cache has a fixed size for sequences of any length.

    In an encoder the pattern is as published. The window is symmetric: the token itself and window // 2 tokens on
    either side. The `first` and `last` tokens of the sequence are global: all tokens attend to them, and they attend to
    all tokens. Without random blocks this is Longformer (arXiv 2004.05150, section 3), where `window` is called w. With
    random blocks it is BigBird (arXiv 2007.14062, section 2 and appendix D), which is sparse by blocks: the window is
    the token's own block and window // 2 // block blocks on either side, and each block of queries attends to `random`
    blocks that are drawn, without replacement, from all blocks outside its window whose tokens are not all global.
    """

    window: PositiveInt  # number of tokens in the window
    first: NonNegativeInt = 0  # number of tokens at the start of the sequence
    random: NonNegativeInt = 0  # number of random blocks
    block: PositiveInt = 16  # tokens per block; only random blocks use it
    seed: int = 0  # seed of the random blocks, which are the same for all heads and sequences
    last: NonNegativeInt = 0  # encoders only: number of global tokens at the end of the sequence
    # encoders only: whether global tokens attend to all tokens by queries, keys and values of their own projections,
    # which begin as copies of the others (Longformer, section 3.1)
    global_projections: bool = False

    @property
    def far(self) -> int:
        """Largest number of tokens outside the window that a token of a causal layer attends to."""
        return self.first + self.random * self.block

    @property
    def slots(self) -> int:
        """Number of earlier tokens in the cache."""
        return self.far + self.window - 1

    @property
    def unit(self) -> int:
        """Number of tokens that enter an encoder's window together."""
        return self.block if self.random else 1

    @property
    def reach(self) -> int:
        """Number of tokens on either side of a unit in an encoder's window."""
        return self.window // 2 // self.unit * self.unit


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
    pattern: Pattern | None = None  # sparsity pattern; None: all earlier tokens, in an encoder all tokens
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
