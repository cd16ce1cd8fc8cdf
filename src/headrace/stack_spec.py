"""What stands around the token mixers of a model, as data; and whole models of blocks."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .errors import InputError
from .model_spec import ModelSpec
from .spec import TYPES, AttentionSpec, Spec, record


@dataclass(frozen=True)
class BlockStyle:
    """What all blocks of a stack have in common beside their mixers."""

    norm: Literal["rms", "layer"] = "rms"
    order: Literal["pre", "post"] = "pre"  # pre: norms before mixer and MLP; post: after each sum, and none at the end
    mlp: Literal["swiglu", "geglu", "gelu", "gelu-tanh", "relu", "none"] = "swiglu"
    bias: bool = False  # of the MLP and of layer norms
    positions: Literal["none", "sinusoidal", "learned"] = "none"  # added to the embeddings

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")


def as_style(given: Any) -> BlockStyle:
    """A style given as one, as a dict of what differs from the default, or as None. Raises InputError."""
    if given is None or isinstance(given, BlockStyle):
        given = {} if given is None else vars(given)
    if not isinstance(given, dict):
        raise InputError(f"style={given!r}; expected a BlockStyle or a dict of its fields")
    return record(BlockStyle, given, "style")


@dataclass(frozen=True)
class StackSpec(ModelSpec):
    """A whole model of blocks. Its mixer is any of the zoo's; an encoder uses it both ways."""

    mixer: Spec = field(default_factory=lambda: AttentionSpec(rotary=False))
    style: BlockStyle = field(default_factory=BlockStyle)

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        return self.mixer.head_dims(hidden_size, num_heads)

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return self.mixer.idle_gates(num_heads)

    def num_heads(self, default: int) -> int:
        return self.mixer.num_heads(default)


@dataclass(frozen=True)
class TransformerSpec(StackSpec):
    """An encoder, and a decoder that reads it by cross attention, which has no positions."""

    scaled: Literal["input", "output"] = "input"  # where the shared embedding is: input: · D^½; output: logits · D^-½
    label_smoothing: float = 0.0  # of the loss in training

    @property
    def cross(self) -> AttentionSpec:
        own = self.mixer if isinstance(self.mixer, AttentionSpec) else AttentionSpec()
        return replace(own, rotary=False, buckets=None, pattern=None)

    def state_bytes(self, hidden_size: int, num_heads: int, tokens: int, layers: int, itemsize: int = 4) -> int:
        at = {"tokens": tokens} if isinstance(self.mixer, AttentionSpec) else {}
        own = self.mixer.state_bytes(hidden_size, num_heads, itemsize, **at)
        return layers * (own + self.cross.state_bytes(hidden_size, num_heads, itemsize, tokens))


@dataclass(frozen=True)
class BertSpec(StackSpec):
    """An encoder alone, with heads for masked tokens and for whether two segments belong together."""

    answers = False

    def state_bytes(self, hidden_size: int, num_heads: int, tokens: int, layers: int, itemsize: int = 4) -> int:
        return 0  # nothing is carried from token to token


TYPES |= {"transformer": TransformerSpec, "bert": BertSpec}
