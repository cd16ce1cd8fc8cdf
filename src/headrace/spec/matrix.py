"""The spec of a mixer with a matrix memory per head whose update `linear_attention` cannot express."""

from dataclasses import dataclass
from typing import Literal

from .mixer import Facts, Shapes, Spec, Update, heads_of_width, width_per_head
from .record import PositiveFloat, PositiveInt, require_positive

SLOTTED = "gsa", "abc"  # attention to slots
# A new kind is a row here, its name in `MatrixSpec`, and the module of its layer.
KINDS = {
    "rwkv7": Facts(
        ".matrix.rwkv7.RWKV7",
        Update("diag(α) − κᵀ(a κ)", "v", "α, per key channel", "½‖v − kS‖²"),
        flops=9,  # decay: 1; κ S: 2; − (a κ)ᵀ (κ S): 2; + kᵀ v: 2; q S: 2
    ),
    "gla-outer": Facts(
        ".matrix.gla_outer.GLAOuter",
        Update("α … βᵀ", "v", "α βᵀ, per number"),
        flops=6,  # both decays: 2; + kᵀ v: 2; q S: 2
    ),
    "gsa": Facts(
        ".matrix.slots.SlotAttention",
        Update("diag(α)", "(k, v)", "α, per slot"),
        flops=5,  # decay: 1; + (1 − α)ᵀ (k, v): 2; q Kᵀ and p V: 2
    ),
    "abc": Facts(
        ".matrix.slots.SlotAttention",
        Update("diag(1 − p)", "(k, v)", "1 − p, per slot; p = e^w / Σ e^w"),
        flops=5,  # as gsa
    ),
}


@dataclass(frozen=True)
class MatrixSpec(Spec):
    """A mixer with the memory update S ← A_t S + kᵀ v, for a transition A_t that `linear_attention` does not have:
    RWKV-7 (arXiv 2503.14456), GLA with a decay of keys and values (arXiv 2312.06635), or attention to slots, GSA (arXiv
    2409.07146) and ABC (arXiv 2110.02488)."""

    kind: Literal["rwkv7", "gla-outer", "gsa", "abc"]
    # rwkv7, gla-outer: rank of the low-rank projections; None: the papers' rank for the hidden size
    rank: PositiveInt | None = None
    slots: PositiveInt | None = None  # gsa, abc: number of slots per head; None: the key dimension
    expand_k: PositiveFloat = 1.0  # key dimensions of all heads together, as a multiple of the hidden size
    expand_v: PositiveFloat = 1.0  # value dimensions of all heads together, as a multiple of the hidden size
    count: PositiveInt | None = None  # number of heads; None: that of `width`
    # value dimension per head in the paper, from which the number of heads follows; None, and in a model narrower than
    # 4 such heads: the model's num_heads
    width: PositiveInt | None = None

    uncompeting = "computes its memory by a recurrence of its own, which has no gates of competition"

    @property
    def gated(self) -> bool:  # type: ignore[override]
        return self.kind not in SLOTTED

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        return KINDS[self.kind]

    def _objections(self):
        yield (
            self.kind == "rwkv7" and (self.expand_k != 1 or self.expand_v != 1),
            f"expand_k={self.expand_k} and expand_v={self.expand_v} with kind='rwkv7'; expected 1 for both",
        )
        foreign = "rank" if self.kind in SLOTTED else "slots"
        yield getattr(self, foreign) is not None, f"kind={self.kind!r} has no {foreign}; got {getattr(self, foreign)}"

    def num_heads(self, hidden_size: int, default: int) -> int:
        """Returns the number of heads: `count`, or that of `width` at this hidden size, or `default`."""
        return heads_of_width(self.count, self.width, self.expand_v * hidden_size, default)

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns (K, V), the key and value dimensions per head. Raises InputError for widths that do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        H = self.num_heads(hidden_size, num_heads)
        K = width_per_head("expand_k", self.expand_k, hidden_size, H)
        return K, width_per_head("expand_v", self.expand_v, hidden_size, H)

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of the recurrent state of one sequence, without the batch dimension."""
        H, (K, V) = self.num_heads(hidden_size, num_heads), self.head_dims(hidden_size, num_heads)
        if self.kind in SLOTTED:  # per slot: a key, a value, and the sum of weights of abc
            return {"memory": (H, self.slots or K, K + V + (self.kind == "abc"))}
        memory = (H, K, V)
        return {"memory": memory, "shift": (1, hidden_size)} if self.kind == "rwkv7" else {"memory": memory}
