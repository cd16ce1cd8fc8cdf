"""The spec of multi-head latent attention."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...spec.attention import Gate, Rope, SoftmaxSpec, divided
from ...spec.mixer import Facts, Shapes
from ...spec.record import PositiveFloat, PositiveInt, require_positive
from ...spec.serialize import TYPES


@dataclass(frozen=True)
class LatentSpec(SoftmaxSpec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are projections of one
    normalized latent per token, which is the cache. One more part of the keys, which all heads share, is projected from
    the token and has rotary positions. By default the sizes are the paper's, relative to d, the hidden size over the
    number of heads; queries have no latent, as in DeepSeek-V2-Lite."""

    rank: PositiveInt | None = None  # size of the latent; None: 4 d
    q_rank: PositiveInt | None = None  # size of the latent of the queries; None: they are projected from the token
    key_dim: PositiveInt | None = None  # dimension of a head's own part of q and k; None: d
    shared_dim: PositiveInt | None = None  # dimension of the part of k that all heads share; None: d/2, made even
    value_dim: PositiveInt | None = None  # dimension of a head's values; None: d
    rotary: bool = True  # whether the shared part gets rotary position embeddings
    rope: Rope = field(default_factory=Rope)  # the frequencies of rotary positions
    count: PositiveInt | None = None  # number of heads; None: the model's num_heads
    scale: Literal["key"] | PositiveFloat = "key"  # factor of the logits; key: (key_dim + shared_dim)^-1/2
    gate: Gate = "none"  # as in AttentionSpec
    bias: bool = False  # whether the projections from the token to a latent, and of the output, have biases
    norm_eps: PositiveFloat | None = None  # epsilon of the latents' norms; None: the model's

    facts = Facts("headrace.extra.latent.LatentAttention", cached=True)
    # What AttentionSpec has besides.
    form: ClassVar[str] = "sdpa"
    null: ClassVar[bool] = False
    pattern: ClassVar[None] = None
    forget: ClassVar[bool] = False

    def _objections(self):
        yield from super()._objections()
        yield self.rope.dims is not None, f"rope.dims={self.rope.dims}; expected None, as shared_dim is what rotates"

    def sizes(self, hidden_size: int, num_heads: int) -> tuple[int, int, int, int]:
        """Returns rank, key_dim, shared_dim and value_dim. Raises InputError for sizes that do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        complete = None not in (self.rank, self.key_dim, self.shared_dim, self.value_dim)
        d = 1 if complete else divided(hidden_size, self.num_heads(hidden_size, num_heads))
        shared = self.shared_dim or (d + 3) // 4 * 2
        if self.rotary:
            self.rope.require_width(shared)
        return self.rank or 4 * d, self.key_dim or d, shared, self.value_dim or d

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        _, K, shared, V = self.sizes(hidden_size, num_heads)
        return K + shared, V

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of one sequence's cache after `tokens` tokens: shared keys, and latents."""
        rank, _, shared, _ = self.sizes(hidden_size, num_heads)
        return {"k": (tokens, 1, shared), "v": (tokens, 1, rank)}


TYPES["latent"] = LatentSpec
