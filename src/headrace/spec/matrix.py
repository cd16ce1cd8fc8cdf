"""The spec of a mixer with a matrix memory per head whose update `linear_attention` cannot express."""

from dataclasses import dataclass
from typing import Literal

from .mixer import Facts, Shapes, Spec, Update, width_per_head
from .record import PositiveFloat, PositiveInt, require_positive

# A new kind is a row here, its name in `MatrixSpec`, and the module of its layer.
KINDS = {
    "rwkv7": Facts(
        "matrix.rwkv7.RWKV7",
        Update("diag(α) − κᵀ(a κ)", "v", "α, per key channel", "½‖v − kS‖²"),
        flops=9,  # decay: 1; κ S: 2; − (a κ)ᵀ (κ S): 2; + kᵀ v: 2; q S: 2
    ),
    "gla-outer": Facts(
        "matrix.gla_outer.GLAOuter",
        Update("α … βᵀ", "v", "α βᵀ, per number"),
        flops=6,  # both decays: 2; + kᵀ v: 2; q S: 2
    ),
}


@dataclass(frozen=True)
class MatrixSpec(Spec):
    """A mixer with the memory update S ← A_t S + kᵀ v, for a transition A_t that `linear_attention` does not have:
    RWKV-7 (arXiv 2503.14456), or GLA with a decay of keys and values (arXiv 2312.06635)."""

    kind: Literal["rwkv7", "gla-outer"]
    rank: PositiveInt | None = None  # rank of the low-rank projections; None: the papers' rank for the hidden size
    expand_k: PositiveFloat = 1.0  # key dimensions of all heads together, as a multiple of the hidden size
    expand_v: PositiveFloat = 1.0  # value dimensions of all heads together, as a multiple of the hidden size
    count: PositiveInt | None = None  # number of heads; None: the model's num_heads

    uncompeting = "computes its memory by a recurrence of its own, which has no gates of competition"
    gated = True

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        return KINDS[self.kind]

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
        H = self.num_heads(num_heads)
        K = width_per_head("expand_k", self.expand_k, hidden_size, H)
        return K, width_per_head("expand_v", self.expand_v, hidden_size, H)

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int = 1) -> Shapes:
        """Returns the shapes of the recurrent state of one sequence, without the batch dimension."""
        memory = (self.num_heads(num_heads), *self.head_dims(hidden_size, num_heads))
        return {"memory": memory, "shift": (1, hidden_size)} if self.kind == "rwkv7" else {"memory": memory}
