"""The spec of a mixer with a matrix memory per head whose update `linear_attention` cannot express."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from ...spec.mixer import Facts, Shapes, Spec, heads_of_width, width_per_head
from ...spec.record import Factor, Names, PositiveFloat, PositiveInt, require_positive
from ...spec.serialize import TYPES
from ...utils.tables import Table


class MatrixKind(NamedTuple):
    """What a kind of matrix memory is, besides how it is computed."""

    facts: Facts
    fields: tuple[str, ...] = ()  # the fields of MatrixSpec that it has, of OPTIONS
    gated: bool = True
    # the shapes of the state of one sequence, from the spec, the hidden size, and the shape [H, K, V] of the memory
    shapes: Callable[[Any, int, tuple[int, int, int]], Shapes] = lambda spec, hidden_size, memory: {"memory": memory}


KINDS: Table[MatrixKind] = Table("matrix_kinds")  # which plug-ins have
# Fields with a default, which not all kinds have.
OPTIONS = "rank", "rate_rank", "value_rank", "gate_rank", "slots", "expand_k", "expand_v", "eps"


@dataclass(frozen=True)
class MatrixSpec(Spec):
    """A mixer with the memory update S ← A_t S + kᵀ v, for a transition A_t that `linear_attention` does not have:
    such as RWKV-7's (arXiv 2503.14456)."""

    kind: Annotated[str, Names(KINDS)]
    rank: PositiveInt | None = None  # of the low-rank projections; None: the papers' rank for the hidden size
    rate_rank: PositiveInt | None = None  # rwkv7: of that to the strength of the erasure; None: as rank
    value_rank: PositiveInt | None = None  # rwkv7: of that to the share of the first layer's values; None: as rank
    gate_rank: PositiveInt | None = None  # rwkv7: of that to the gate; None: as rank
    slots: PositiveInt | None = None  # number of slots per head; None: the key dimension
    expand_k: Factor = 1.0  # key dimensions of all heads together, as a multiple of the hidden size
    expand_v: Factor = 1.0  # value dimensions of all heads together, as a multiple of the hidden size
    count: PositiveInt | None = None  # number of heads; None: that of `width`
    # value dimension per head in the paper, from which the number of heads follows; None, and in a model narrower than
    # 4 such heads: the model's num_heads
    width: PositiveInt | None = None
    eps: PositiveFloat | None = None  # gsa, rwkv7: of the norm; None: the model's, in rwkv7 6.4e-4

    table = "matrices"
    uncompeting = "computes its memory by a recurrence of its own, which has no gates of competition"

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return KINDS[self.kind].gated

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        return KINDS[self.kind].facts

    def _objections(self):
        for name in OPTIONS:
            value, has = getattr(self, name), name in KINDS[self.kind].fields
            yield (
                not has and value != getattr(MatrixSpec, name),
                f"kind={self.kind!r} has no {name}; got {name}={value}",
            )

    def num_heads(self, hidden_size: int, default: int) -> int:
        """Returns the number of heads: `count`, or that of `width` at this hidden size, or `default`."""
        return heads_of_width(self.count, self.width, self.expand_v * hidden_size, default)

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H = self.num_heads(hidden_size, num_heads)
        K = width_per_head("expand_k", self.expand_k, hidden_size, H)
        return K, width_per_head("expand_v", self.expand_v, hidden_size, H)

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        H, (K, V) = self.num_heads(hidden_size, num_heads), self.head_dims(hidden_size, num_heads)
        return KINDS[self.kind].shapes(self, hidden_size, (H, K, V))


TYPES["matrix"] = MatrixSpec
