"""The specs of softmax attention and of its latent form: heads, positions and sparsity pattern."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ..utils.errors import InputError, require
from ..utils.tables import Table
from .mixer import Facts, Shapes, Spec
from .record import NonNegativeInt, PositiveFloat, PositiveInt, Range, Record, fields, require_positive

# The kinds of `Rope`, each with the fields that it uses besides theta and dims.
ROPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original"),
    "yarn": ("factor", "original", "slow", "fast", "truncate", "amplitude"),
    "llama3": ("factor", "original", "slow", "fast"),
    "longrope": ("factor", "original", "short", "long", "amplitude"),
}  # fmt: skip


@dataclass(frozen=True)
class Rope(Record):
    """The frequencies of rotary positions (arXiv 2104.09864): theta^(−2i/dims) for the channels i and i + dims/2, or
    these frequencies changed for sequences that are longer than the `original` ones, by the kind:

    linear: all are divided by `factor` (arXiv 2306.15595).
    dynamic: theta is multiplied by (factor · n / original − factor + 1)^(dims/(dims − 2)) in a sequence of n > original
        tokens.
    yarn, llama3: those of up to `slow` rotations in `original` tokens are divided by `factor`, those of `fast` and more
        are kept, and between them the share that is divided is linear in the index of the channel (arXiv 2309.00071) or
        in the number of rotations (Llama 3.1, arXiv 2407.21783).
    longrope: each is divided by its number in `short`, or in `long` if the sequence has more than `original` tokens
        (arXiv 2402.13753). `factor` sets the amplitude alone.

    In dynamic and longrope the length is that of each sequence, with the tokens of its cache. The cache then has keys
    before rotation, so that decoding equals a pass over all tokens so far; transformers takes the longest sequence of a
    batch, and leaves cached keys as they are.
    """

    kind: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = "default"  # see above
    theta: PositiveFloat | None = None  # base of the frequencies; None: the model's rope_theta
    # number of rotated channels, the first ones of a head; None: all
    dims: Annotated[int, Range("an even number of at least 2", lambda n: n >= 2 and n % 2 == 0)] | None = None
    factor: PositiveFloat = 1.0  # by how much longer sequences may be
    original: PositiveInt | None = None  # number of tokens of the sequences before the extension
    slow: PositiveFloat = 1.0  # yarn, llama3: rotations in `original` tokens up to which frequencies are divided
    fast: PositiveFloat = 32.0  # yarn, llama3: rotations from which they are kept
    truncate: bool = True  # yarn: whether the channels at which the share begins and ends to change are rounded
    # factor of the rotated channels; None: 1 + 0.1 log factor (yarn), √(1 + log factor / log original) (longrope)
    amplitude: PositiveFloat | None = None
    short: tuple[PositiveFloat, ...] | None = None  # longrope: divisors in sequences of up to `original` tokens
    # longrope: divisors in longer sequences
    long: tuple[PositiveFloat, ...] | None = None

    def _objections(self):
        used = ("kind", "theta", "dims", *ROPES[self.kind])
        cls: Any = type(self)
        for name in fields(cls):
            value, default = getattr(self, name), getattr(cls, name)
            yield name not in used and value != default, f"rope.kind={self.kind!r} has no {name}; got {value}"
        yield self.kind == "longrope" and self.original == 1, "rope.kind='longrope' with original=1; expected more"
        for name in ("original", "short", "long"):
            yield name in used and getattr(self, name) is None, f"rope.kind={self.kind!r} needs {name}; got none"
        yield self.slow >= self.fast, f"rope.slow={self.slow} and fast={self.fast}; expected slow below fast"

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the number of tokens of the sequence."""
        return self.kind == "dynamic" or self.short != self.long

    @property
    def scale(self) -> float:
        """The factor of the rotated channels."""
        if self.amplitude is not None or self.kind not in ("yarn", "longrope") or self.factor <= 1:
            return self.amplitude or 1.0
        log = math.log(self.factor)
        return 1 + 0.1 * log if self.kind == "yarn" else math.sqrt(1 + log / math.log(self.original or 1))

    def require_width(self, head_dim: int) -> None:
        """Raises InputError for a head dimension that the frequencies do not fit."""
        width = self.dims or head_dim
        require(width % 2 == 0, f"rotary=True needs an even head dimension; got {head_dim}")
        if width > head_dim or (self.kind == "dynamic" and width == 2):
            raise InputError(f"rope.dims={width} with kind={self.kind!r} does not fit a head dimension of {head_dim}")
        for name in ("short", "long"):
            divisors = getattr(self, name)
            if divisors is not None and len(divisors) != width // 2:
                raise InputError(f"rope.{name} has {len(divisors)} numbers; expected {width // 2}, one per frequency")


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


# Of plug-ins, as `Facts.layer`. early: the layer for tiles, buckets, random blocks, and patterns of encoders; pattern,
# forget: the functions by which other layers compute attention with these fields.
LAYERS: Table[str] = Table("attention_layers")
Gate = Literal["none", "channel", "head"]
Scale = Literal["key", "one", "half-key"] | PositiveFloat


class SoftmaxSpec(Spec):
    """What the specs of softmax attention share."""

    count: int | None  # number of query heads; None: the model's num_heads
    gate: Gate
    rotary: bool
    rope: Rope

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return self.gate != "none"

    def num_heads(self, hidden_size: int, default: int) -> int:
        """Returns the number of query heads, which is `default` unless the spec sets it."""
        return self.count or default

    def _objections(self):
        yield not self.rotary and self.rope != Rope(), "rope sets frequencies, and rotary=False; expected rotary=True"


@dataclass(frozen=True)
class AttentionSpec(SoftmaxSpec):
    """Softmax attention (arXiv 1706.03762). The defaults are causal, with rotary positions, over all earlier tokens."""

    # number of k/v heads, shared by consecutive query heads; None: one per query head
    kv_heads: PositiveInt | None = None
    rotary: bool = True  # whether q and k get rotary position embeddings
    count: PositiveInt | None = None  # number of query heads; None: the model's num_heads
    # number of distance buckets of T5's relative position bias, half of them for single distances; None: no bias
    buckets: Annotated[int, Range("4 to 255", lambda n: 4 <= n <= 255)] | None = None
    # whether the softmax has one more logit, for a value of zeros, so that a head can attend to nothing: the logit is
    # 0, or learned per head (attention sinks, arXiv 2508.10925)
    null: bool | Literal["learned"] = False
    scale: Scale = "key"  # factor of the logits, or its name: d^-1/2, 1 (T5), (d/2)^-1/2 (Zamba)
    form: Literal["sdpa", "tiles"] = "sdpa"  # PyTorch's attention, or FlashAttention's tiles in plain PyTorch
    pattern: Pattern | None = None  # sparsity pattern; None: all earlier tokens, in an encoder all tokens
    # whether all projections have biases, or those of q, k and v (Qwen2), or of the output (RecurrentGemma)
    bias: bool | Literal["qkv", "o"] = False
    head_dim: PositiveInt | None = None  # d; None: the hidden size over the number of query heads
    rope: Rope = field(default_factory=Rope)  # the frequencies of rotary positions
    # RMSNorm with weights of q and k before the rotation: per head (Qwen3), or of all heads together (OLMo 2); offset:
    # with weights that are stored minus 1 (Qwen3-Next)
    qk_norm: Literal["none", "head", "head-offset", "joint"] = "none"
    gate: Gate = "none"  # a sigmoid of a projection of the input multiplies the heads' outputs (arXiv 2505.06708)
    # whether a logit has Σ log f over the tokens after its key up to its query, where f is a sigmoid gate per token and
    # head: Forgetting Transformer (arXiv 2503.02130)
    forget: bool = False

    facts = Facts(".attention.attention.SoftmaxAttention", cached=True)
    table = "attention"

    def layer(self, causal: bool) -> str:
        """Returns the layer: the one of the core, or one of LAYERS for options that the core lacks."""
        sparse = self.pattern is not None and (self.pattern.random > 0 or not causal)
        early = sparse or self.form == "tiles" or self.buckets is not None
        return LAYERS["early"] if early else self.facts.layer

    def _objections(self):
        yield (
            self.forget and (self.form == "tiles" or self.pattern is not None),
            "forget=True supports neither form='tiles' nor a pattern; expected form='sdpa' and pattern=None",
        )
        yield (
            self.form == "tiles" and (self.buckets is not None or bool(self.null) or self.pattern is not None),
            "form='tiles' supports neither buckets, null nor pattern; expected none of them, or form='sdpa'",
        )
        yield from super()._objections()
        turned = self.rope.by_length and self.pattern is not None
        yield turned, f"rope.kind={self.rope.kind!r} with a pattern is not available; expected pattern=None"

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H = self.num_heads(hidden_size, num_heads)
        d = self.head_dim or divided(hidden_size, H)
        require(H % (self.kv_heads or H) == 0, f"kv_heads={self.kv_heads} does not divide num_heads={H}")
        if self.rotary:
            self.rope.require_width(d)
        return d, d

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of one sequence's key/value cache after `tokens` tokens; a pattern bounds its length."""
        H, kept = self.num_heads(hidden_size, num_heads), self.pattern.slots if self.pattern else tokens
        heads, (K, V) = self.kv_heads or H, self.head_dims(hidden_size, num_heads)
        return {"k": (kept, heads, K + self.forget * H // heads), "v": (kept, heads, V)}


def divided(hidden_size: int, H: int) -> int:
    require(hidden_size % H == 0, f"num_heads={H} does not divide hidden_size={hidden_size}")
    return hidden_size // H
