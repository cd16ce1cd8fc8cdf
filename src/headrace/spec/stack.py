"""What a model is beside its token mixers, as data: its layers, what stands around them; and whole models of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from ..utils.errors import InputError
from .encoder_decoder import ModelSpec
from .linear import CACHED, TYPES, AttentionSpec, Spec, record
from .record import NonNegativeFloat, PositiveInt, Range, Record, require_positive


@dataclass(frozen=True)
class Experts(Record):
    """A mixture of MLPs: of `count`, every token goes to the `chosen` ones that its router likes best."""

    count: PositiveInt = 16
    chosen: PositiveInt = 2
    balance: NonNegativeFloat = 0.001  # weight of the load-balancing loss in training

    def _objections(self):
        chosen, count = self.chosen, self.count
        yield chosen > count, f"experts.chosen={chosen} of experts.count={count}; expected 1 to all of them"


@dataclass(frozen=True)
class BlockStyle(Record):
    """What all blocks of a stack have in common beside their mixers."""

    norm: Literal["rms", "layer"] = "rms"
    order: Literal["pre", "post"] = "pre"  # pre: norms before mixer and MLP; post: after each sum, and none at the end
    mlp: Literal["swiglu", "geglu", "gelu", "gelu-tanh", "relu", "none"] = "swiglu"
    bias: bool = False  # of the MLP and of layer norms
    positions: Literal["none", "sinusoidal", "learned"] = "none"  # added to the embeddings
    experts: Experts | None = None  # of the layers that have them in place of one MLP
    shared: AttentionSpec | None = None  # of the one block that some layers share
    embedding_norm: bool = False  # after the positions (BERT, BLOOM)

    @property
    def gated(self) -> bool:
        return self.mlp in ("swiglu", "geglu")


@dataclass(frozen=True)
class Layer(Record):
    """One layer. With `shared` its mixer reads, beside x, what the style's shared block makes of x and embeddings."""

    mixer: Spec
    mlp: Literal["one", "experts", "none"] = "one"
    shared: bool = False


@dataclass(frozen=True)
class Decoder(Record):
    """A language model: a pattern of layers, repeated over the depth, and their style."""

    layers: tuple[Layer, ...]
    style: BlockStyle = field(default_factory=BlockStyle)

    def _objections(self):
        yield not self.layers, "layers=(); expected at least one layer"
        for wanted, given in (("experts", self.style.experts), ("shared", self.style.shared)):
            used = any(layer.mlp == "experts" if wanted == "experts" else layer.shared for layer in self.layers)
            reason = f"a layer has {wanted} and style.{wanted} is none; expected to be told which"
            yield used and given is None, reason

    def over(self, depth: int) -> list[Layer]:
        """The layers of a model of this depth. It may end within the pattern."""
        return [self.layers[i % len(self.layers)] for i in range(depth)]

    def num_heads(self, default: int) -> int:
        return default

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Of the first mixer. Raises InputError where the widths of any do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        if self.style.shared is not None:
            self.style.shared.head_dims(2 * hidden_size, num_heads)
        dims = [layer.mixer.head_dims(hidden_size, num_heads) for layer in self.layers]
        return dims[0]

    def idle_gates(self, num_heads: int | None = None) -> list[str]:
        return list(dict.fromkeys(idle for layer in self.layers for idle in layer.mixer.idle_gates(num_heads)))

    def state_bytes(self, hidden_size: int, num_heads: int, tokens: int, layers: int, itemsize: int = 4) -> int:
        """What one sequence carries after `tokens` tokens, in a model of so many layers."""
        held = [(layer.mixer, hidden_size) for layer in self.over(layers)]
        if self.style.shared is not None:
            held += [(self.style.shared, 2 * hidden_size)] * sum(layer.shared for layer in self.over(layers))
        at = [{"tokens": tokens} if isinstance(mixer, CACHED) else {} for mixer, _ in held]
        return sum(m.state_bytes(w, num_heads, itemsize, **kw) for (m, w), kw in zip(held, at, strict=True))


def as_decoder(spec: Spec | Decoder) -> Decoder:
    """A spec as a model: a mixer is the pattern of one layer."""
    return spec if isinstance(spec, Decoder) else Decoder((Layer(spec),))


def as_layers(spec: Spec | Layer | Decoder) -> Sequence[Layer]:
    if isinstance(spec, Decoder):
        return spec.layers
    return (spec if isinstance(spec, Layer) else Layer(spec),)


def as_style(given: Any, base: BlockStyle | None = None) -> BlockStyle:
    """A style given as one, as a dict of what differs from the base, or as None. Raises InputError."""
    base = base or BlockStyle()
    if given is None or isinstance(given, BlockStyle):
        return given or base
    if not isinstance(given, dict):
        raise InputError(f"style={given!r}; expected a BlockStyle or a dict of its fields")
    changed = record(BlockStyle, given, "style")
    return replace(base, **{name: getattr(changed, name) for name in given})


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
    # of the loss in training
    label_smoothing: Annotated[float, Range("0 to 1", lambda x: 0 <= x <= 1)] = 0.0

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

    def state_bytes(self, hidden_size: int, num_heads: int, tokens: int, layers: int, itemsize: int = 4) -> int:
        return 0  # nothing is carried from token to token


TYPES |= {"layer": Layer, "decoder": Decoder, "transformer": TransformerSpec, "bert": BertSpec}
