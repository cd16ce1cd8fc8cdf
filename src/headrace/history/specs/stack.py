"""The specs of Transformer and BERT, models of blocks that all have the same mixer and style."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from ...spec.attention import AttentionSpec, Rope
from ...spec.mixer import ModelSpec, Shapes, Spec
from ...spec.record import Range
from ...spec.stack import MLPS, BlockStyle
from .encoder_decoder import BUILDER


@dataclass(frozen=True)
class StackSpec(ModelSpec):
    """Base of the specs of Transformer and BERT, models whose blocks all have the same mixer and style."""

    builder = BUILDER

    mixer: Spec = field(default_factory=lambda: AttentionSpec(rotary=False))  # bidirectional in an encoder
    style: BlockStyle = field(default_factory=BlockStyle)

    def _objections(self):
        mlp, order = self.style.mlp, self.style.order
        yield mlp in MLPS, f"style.mlp={mlp!r} is for decoders alone; expected another MLP"
        ordered = order in ("both", "parallel", "parallel-joint")
        yield ordered, f"style.order={order!r} is for decoders alone; expected another order"
        yield self.style.logits_cap is not None, "style.logits_cap is for decoders alone; expected none"
        yield self.style.head_bias, "style.head_bias=True is for decoders alone; expected False"

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        return self.mixer.head_dims(hidden_size, num_heads)

    def idle_gates(self, hidden_size: int | None = None, num_heads: int | None = None) -> list[str]:
        return self.mixer.idle_gates(hidden_size, num_heads)

    def num_heads(self, hidden_size: int, default: int) -> int:
        return self.mixer.num_heads(hidden_size, default)


@dataclass(frozen=True)
class TransformerSpec(StackSpec):
    """A Transformer encoder-decoder. The cross-attention has no positions."""

    # where the tied embedding is scaled: input: embeddings times D^1/2; output: logits times D^-1/2
    scaled: Literal["input", "output"] = "input"
    # label smoothing of the training loss
    label_smoothing: Annotated[float, Range("0 to 1", lambda x: 0 <= x <= 1)] = 0.0

    @property
    def cross(self) -> AttentionSpec:
        """Spec of the cross-attention: the mixer's, if that is attention, without positions, pattern and
        forgetting."""
        own = self.mixer if isinstance(self.mixer, AttentionSpec) else AttentionSpec()
        return replace(own, rotary=False, rope=Rope(), buckets=None, pattern=None, forget=False)

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int, layers: int) -> Shapes:
        """Returns the shapes of the decoder's states for a source and a target of `tokens` tokens each."""
        return {
            f"{i}.{part}.{name}": shape for i in range(layers) for part in ("mixer", "cross")
            for name, shape in getattr(self, part).state_shapes(hidden_size, num_heads, tokens).items()
        }  # fmt: skip


@dataclass(frozen=True)
class BertSpec(StackSpec):
    """A BERT encoder with heads for masked-token and next-sentence prediction."""

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int, layers: int) -> Shapes:
        """Returns {}, since an encoder has no state."""
        return {}
