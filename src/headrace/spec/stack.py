"""The specs of models built of blocks: the blocks' style, the decoder's layers, Transformer and BERT."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..utils.errors import require_each
from ..utils.tables import Table
from .attention import AttentionSpec
from .mixer import Shapes, Spec, Stateful
from .record import NonNegativeFloat, PositiveFloat, PositiveInt, Record, require_positive
from .serialize import TYPES, admitted

Order = Literal["pre", "post", "branch", "both", "parallel", "parallel-joint"]
MLPS: Table[str] = Table("mlps")  # layers of plug-ins, as `Facts.layer`: MLPs by kind, and the experts
SHARED: Table[str] = Table("shared_blocks")  # likewise: "block", that layers share, and their "adapters"


@dataclass(frozen=True)
class Experts(Record):
    """A mixture of experts in place of an MLP."""

    count: PositiveInt = 16  # number of experts
    chosen: PositiveInt = 2  # number of experts per token, chosen by the router
    balance: NonNegativeFloat = 0.001  # weight of the load-balancing loss in training, over the rows of each pass
    width: PositiveInt | None = None  # width of each expert; None: the model's intermediate_size
    scores: Literal["softmax", "sigmoid"] = "softmax"  # function of the router's logits: over the experts, or of each
    biased: bool = False  # whether experts are chosen by scores plus a bias of each, without gradient (DeepSeek-V3)
    groups: PositiveInt = 1  # number of groups of consecutive experts; a group scores the sum of its `best` experts
    best: PositiveInt = 2  # number of experts by which a group scores; 1: its best one alone (DeepSeek-V2)
    chosen_groups: PositiveInt = 1  # number of groups per token from which experts are chosen
    normalized: bool = False  # whether the weights of a token's experts are divided by their sum
    eps: NonNegativeFloat = 0.0  # added to that sum
    scale: PositiveFloat = 1.0  # factor of the weights
    shared: PositiveInt | None = None  # width of an MLP of all tokens, which is added; None: there is none
    shared_gate: bool = False  # whether a sigmoid of a linear function of the token multiplies that MLP's output
    latent: PositiveInt | None = None  # size of a projection of the token that experts map; None: the token itself

    @property
    def layer(self) -> str:
        """The layer, as `Facts.layer`."""
        return MLPS["experts"]

    def _objections(self):
        chosen, count, groups, some, best = self.chosen, self.count, self.groups, self.chosen_groups, self.best
        yield chosen > count, f"experts.chosen={chosen} exceeds experts.count={count}; expected 1 to {count}"
        yield some > groups, f"experts.chosen_groups={some} exceeds experts.groups={groups}; expected 1 to {groups}"
        uneven = count % groups > 0 or (groups > 1 and count < best * groups)
        yield uneven, f"experts.groups={groups}, experts.count={count}; expected equal groups of {best} or more experts"
        most = count // groups * some
        yield chosen > most, f"experts.chosen={chosen} exceeds the {most} experts of chosen_groups={some}"
        yield self.shared_gate and self.shared is None, "experts.shared_gate=True without experts.shared"


@dataclass(frozen=True)
class BlockStyle(Record):
    """Properties that all blocks of a model share, beside their mixers."""

    # RMSNorm, RMSNorm whose weight is stored minus 1 (Gemma), or LayerNorm; layer-bias: with biases whatever `bias` is
    # (Falcon, StableLM); -plain: without weights and biases (OLMo, nanochat)
    norm: Literal["rms", "rms-offset", "rms-plain", "layer", "layer-bias", "layer-plain"] = "rms"
    # pre: x + mixer(norm(x)), then x + mlp(norm(x)); post: norm(x + mixer(x)), then norm(x + mlp(x)); branch:
    # x + norm(mixer(x)), then x + norm(mlp(x)) (OLMo 2); both: x + after(mixer(norm(x))), then x + after(mlp(norm(x)))
    # (Gemma 3); parallel: x + mixer(norm(x)) + mlp(norm(x)), with a norm for each (GPT-NeoX), parallel-joint: one for
    # both (GPT-J, Phi). All but post have a norm at the end.
    order: Order = "pre"
    # kind of MLP; relu2: squared; xielu: without biases; rwkv4, rwkv7: channel mixing, with a state and without biases
    mlp: Literal[
        "swiglu", "geglu", "geglu-tanh", "gelu", "gelu-tanh", "relu", "relu2", "xielu", "rwkv4", "rwkv7", "none",
    ] = "swiglu"  # fmt: skip
    bias: bool = False  # whether MLPs and LayerNorms have biases
    positions: Literal["none", "sinusoidal", "learned"] = "none"  # absolute positions, added to the embeddings
    experts: Experts | None = None  # mixture of experts of the layers with mlp="experts"
    shared: AttentionSpec | None = None  # attention of the block that layers with shared=True share (Zamba)
    shared_count: PositiveInt = 1  # number of such blocks, which these layers use in turn (Zamba2)
    # rank of a matrix of each of these layers that is added to the input projections of the block's MLP and attention
    shared_mlp_rank: PositiveInt | None = None
    shared_attention_rank: PositiveInt | None = None
    embedding_norm: bool = False  # whether a norm follows embeddings and positions (BERT, BLOOM)
    embedding_scale: PositiveFloat = 1.0  # factor of the embeddings
    head_bias: bool = False  # whether the logits have biases (GPT-J, Phi)
    logits_cap: PositiveFloat | None = None  # bound c of the logits, which become c tanh(logits / c)

    def _objections(self):
        plugged = self.mlp in MLPS and (self.experts is not None or self.shared is not None)
        yield plugged, f"mlp={self.mlp!r} is of its own kind; expected another MLP with experts and with a shared block"
        for name, usual in (("count", 1), ("mlp_rank", None), ("attention_rank", None)):
            value = getattr(self, f"shared_{name}")
            yield self.shared is None and value != usual, f"shared_{name}={value} without a shared block (shared=none)"

    @property
    def gated(self) -> bool:
        """Whether the MLP is a gated linear unit."""
        return self.mlp in ("swiglu", "geglu", "geglu-tanh")


@dataclass(frozen=True)
class Layer(Record):
    """One layer of a decoder."""

    mixer: Spec
    mlp: Literal["one", "experts", "none"] = "one"  # the style's MLP, the style's mixture of experts, or neither
    shared: bool = False  # whether the output of the style's shared block is added to the mixer's input
    parallel: Spec | None = None  # a second mixer with the same input, whose output is added (Falcon-H1)
    order: Order | None = None  # order of the norms; None: the style's

    @property
    def mixers(self) -> list[Spec]:
        """The specs of the layer's mixers."""
        return [self.mixer] if self.parallel is None else [self.mixer, self.parallel]


@dataclass(frozen=True)
class Decoder(Stateful):
    """A decoder-only language model."""

    layers: tuple[Layer, ...]  # pattern of layers, repeated over the depth
    style: BlockStyle = field(default_factory=BlockStyle)

    def _objections(self):
        yield not self.layers, "layers=(); expected at least one layer"
        experts = any(layer.mlp == "experts" for layer in self.layers)
        inactive = "a layer uses experts and style.mlp='none', which has no activation; expected another style.mlp"
        yield experts and self.style.mlp == "none", inactive
        shared = any(layer.shared for layer in self.layers)
        for name, used in (("experts", experts), ("shared", shared)):
            reason = f"a layer uses {name} and style.{name} is none; expected style.{name} to be set"
            yield used and getattr(self.style, name) is None, reason

    @property
    def gated(self) -> bool:
        """Whether a mixer is gated."""
        return any(mixer.gated for layer in self.layers for mixer in layer.mixers)

    def over(self, depth: int) -> list[Layer]:
        """Returns the layers of a model with `depth` layers. The last repetition of the pattern may be incomplete."""
        return [self.layers[i % len(self.layers)] for i in range(depth)]

    def head_dims(self, hidden_size: int, num_heads: int) -> tuple[int, int]:
        """Returns the key and value dimensions per head of the first mixer.

        Raises InputError if the sizes of any mixer do not divide."""
        require_positive(hidden_size=hidden_size, num_heads=num_heads)
        if self.style.shared is not None:
            self.style.shared.head_dims(2 * hidden_size, num_heads)
        dims = [mixer.head_dims(hidden_size, num_heads) for layer in self.layers for mixer in layer.mixers]
        return dims[0]

    def idle_gates(self, hidden_size: int | None = None, num_heads: int | None = None) -> list[str]:
        """Returns a sentence for each gate of the layers that has no effect."""
        mixers = [mixer for layer in self.layers for mixer in layer.mixers]
        return list(dict.fromkeys(idle for mixer in mixers for idle in mixer.idle_gates(hidden_size, num_heads)))

    def state_shapes(self, hidden_size: int, num_heads: int, tokens: int, layers: int) -> Shapes:
        """Returns the shapes of one sequence's states after `tokens` tokens, over all layers."""
        every = self.over(layers)
        stateful = [(mixer, hidden_size) for layer in every for mixer in layer.mixers]
        if self.style.shared is not None:
            stateful += [(self.style.shared, 2 * hidden_size)] * sum(layer.shared for layer in every)
        shapes = {
            f"{i}.{name}": shape for i, (mixer, width) in enumerate(stateful)
            for name, shape in mixer.state_shapes(width, num_heads, tokens).items()
        }  # fmt: skip
        mixing = [i for i, layer in enumerate(every) if layer.mlp == "one" and self.style.mlp.startswith("rwkv")]
        return shapes | {f"{i}.mlp.shift": (1, hidden_size) for i in mixing}


def as_decoder(spec: Spec | Decoder) -> Decoder:
    """Returns a decoder; a mixer becomes a pattern of one layer."""
    return spec if isinstance(spec, Decoder) else Decoder((Layer(spec),))


def as_layers(spec: Spec | Layer | Decoder) -> Sequence[Layer]:
    """Returns the layers of a decoder, or a mixer or layer as a sequence of one layer."""
    return (spec,) if isinstance(spec, Layer) else as_decoder(spec).layers


def as_style(style: Any, base: BlockStyle | None = None) -> BlockStyle:
    """Returns a style from a BlockStyle, from a dict of the fields that differ from the base, or from None (the base).

    Raises InputError for other types, unknown fields and invalid values."""
    base = base or BlockStyle()
    if style is None or isinstance(style, BlockStyle):
        return style or base
    require_each(lambda x: isinstance(x, dict), "a BlockStyle or a dict of its fields", style=style)
    return replace(base, **admitted(BlockStyle, style, "style"))


TYPES.update(layer=Layer, decoder=Decoder)
