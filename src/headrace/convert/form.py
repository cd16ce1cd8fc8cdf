"""The description of a foreign checkpoint format: what its fields mean, and where in it our tensors are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec.attention import SoftmaxSpec
from ..spec.mixer import Spec
from ..spec.stack import BlockStyle, Decoder, Layer
from ..utils.errors import InputError
from ..utils.integrity import short
from .fields import Config, Fields
from .files import Tensors
from .fp8 import ScaledBlocks, block_of

PRECISIONS = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
)}  # fmt: skip


class Block(NamedTuple):
    """Rows of a tensor that consists of `groups` groups of `each` rows: of every group `size` rows, from `start` on and
    `step` apart, or all of them in another order."""

    groups: int
    each: int
    start: int
    size: int
    step: int = 1
    order: tuple[int, ...] | None = None

    @property
    def index(self) -> Any:
        """The index of the rows in a group."""
        end = self.start + self.size * self.step
        return slice(self.start, end, self.step) if self.order is None else [*self.order]


class View(NamedTuple):
    """The place of one of our tensors in a foreign checkpoint: a tensor, or the rows `block` of it.

    Our values are factor · theirs + offset, of a matrix that is transposed there if `transposed`. shape: the shape of
    the foreign tensor, where ours has another one; the rows of `block` are then those of its first two dimensions, or
    what is left of them once it is transposed. item: the place, along the first dimension of the foreign tensor, of the
    part of which all this is said."""

    name: str
    block: Block | None = None
    offset: float = 0.0
    factor: float = 1.0
    transposed: bool = False
    shape: tuple[int, ...] | None = None
    item: int | None = None

    def rows(self, tensor: Tensor) -> Tensor:
        """Returns the rows of the foreign tensor, as a view where they are consecutive."""
        whole, index = self._place(tensor)
        return whole[index] if self.block is None else whole[index].flatten(0, 1)

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Writes the rows to the foreign tensor."""
        whole, index = self._place(tensor)
        whole[index] = rows.reshape(whole[index].shape)

    def _place(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns a view of the foreign tensor, and in it the index of the rows [rows, …], or [groups, size, …] of a
        block."""
        if self.item is not None:
            tensor = tensor[self.item]
        elif self.block is not None and self.shape is not None:
            tensor = tensor.flatten(0, 1)
        tensor = tensor.T if self.transposed else tensor
        if self.block is None:
            return tensor, ...
        return tensor.unflatten(0, (self.block.groups, self.block.each)), (slice(None), self.block.index)


Views = dict[str, View]


class Model(NamedTuple):
    """A foreign model in our terms."""

    arguments: Config  # of HeadraceConfig
    views: Views  # by the names of our parameters, or of parts of parameters (`slots`)
    outside: tuple[str, ...] = ()  # as `Format.outside`, by the fields
    copies: tuple[tuple[str, str], ...] = ()  # beginnings of names of tensors that may be stored again, and of theirs


@dataclass(frozen=True)
class Format:
    """A foreign architecture.

    read: maps the fields of a config.json to a Model, and raises InputError for a value that cannot be converted.
    defaults: the fields of config.json with their defaults; None: those of transformers' class.
    types: forms, as of `misfit`, of the fields whose default does not show the type.
    outside: beginnings of the names of tensors that belong to other parts of the checkpoint than the language model.
    buffers: ends of the names of tensors that hold no weights.
    inner: the field that holds the config of the language model, in a model of several parts.
    offset: whether its norms store their weights minus 1. A model of ours whose norms do not can be written as well.
    renamed: (part of a name, what checkpoints may have in its place).
    files: opens the tensors of a folder."""

    architecture: str
    read: Callable[[Fields], Model]
    defaults: Config | None = None
    types: Config | None = None
    outside: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    inner: str | None = None
    offset: bool = False
    renamed: tuple[str, str] | None = None
    files: Callable[[Path], Tensors] = ScaledBlocks

    def holds(self, name: str, *outside: str) -> bool:
        """Whether a tensor with this name holds weights of the language model. outside: more beginnings."""
        return not name.startswith((*self.outside, *outside) or "\0") and not name.endswith(self.buffers)

    def of_text(self, described: Config) -> Config:
        """Returns the config of the language model. InputError for one that is missing."""
        if self.inner is None:
            return described
        inner = described.get(self.inner)
        if not isinstance(inner, dict):
            raise InputError(f"config.json has {self.inner}={short(inner)}; expected an object")
        outer = {name: described[name] for name in OUTER if described.get(name) is not None}
        return {"model_type": f"{described['model_type']}_text"} | inner | outer

    def model(self, described: Config) -> tuple[Model, Fields]:
        """Returns the model that a config.json describes, and its fields. InputError for an unknown field or value."""
        fields = Fields(described, self.defaults, self.types)
        try:
            model = self.read(fields)
        except InputError as error:  # of a spec, which has other names for the fields
            named = str(error).startswith("config.json")
            raise InputError(f"{'' if named else 'config.json describes a model whose '}{error}") from None
        if self.files is ScaledBlocks and block_of(described):
            fields.read.add("quantization_config")
        fields.refuse_unknown()
        return model, fields


# Fields with one name in most formats, which `shared` reads.
SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
OUTER = ("tie_word_embeddings", "quantization_config", *SPECIAL)  # those of a model of several parts, before its text's
# Those that are called otherwise.
RENAMED = {
    "max_position_embeddings": ("max_position_embeddings", "model_max_length"),
    "norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
}


def shared(c: Fields, layers: Sequence[Layer], style: BlockStyle, **more: Any) -> Config:
    """Returns the arguments of HeadraceConfig that most formats share, with these layers, from first to last.

    more: arguments that replace or join them."""
    arguments: Config = {name: c[name] for name in SHARED if name not in more}
    arguments |= {name: c.get(name) for name in SPECIAL}
    pattern = period(layers)
    alone = pattern == (Layer(pattern[0].mixer),)
    arguments |= {"mixer": pattern[0].mixer if alone else Decoder(pattern, style), "style": style}
    mixers = [mixer for layer in layers for mixer in layer.mixers] + [style.shared] * (style.shared is not None)
    if "rope_theta" not in more and any(map(rotates, mixers)):
        arguments["rope_theta"] = c["rope_parameters"]["rope_theta"]
    for ours, theirs in RENAMED.items():
        if (value := c.of_class(*theirs)) is not None:
            arguments[ours] = value
    return arguments | more


def rotates(mixer: Spec | None) -> bool:
    """Whether a mixer has rotary positions with the model's frequencies."""
    return isinstance(mixer, SoftmaxSpec) and mixer.rotary and mixer.rope.theta is None


def period(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Returns the shortest pattern of layers whose repetition begins with all of these layers."""
    lengths = range(1, len(layers) + 1)
    length = next(n for n in lengths if all(layers[i] == layers[i % n] for i in range(len(layers))))
    return tuple(layers[:length])


# --- views -----------------------------------------------------------------------------------------------------------

# Names of a model, its embedding, its final norm and its layers.
LLAMA = ("model", "embed_tokens", "norm", "layers")
OUTER = ("model", "embed_tokens", "final_layernorm", "layers")
BACKBONE = ("backbone", "embeddings", "norm_f", "layers")


def outer_views(c: Fields, style: BlockStyle, names: tuple[str, ...] = LLAMA) -> Views:
    """Returns the views outside of layers: the embedding, the final norm and, unless it is tied, the head."""
    model, embedding, norm, _ = names
    views = modules({"model.embed_tokens": f"{model}.{embedding}"})
    views |= norm_views(style, {"model.backbone.norm": f"{model}.{norm}"})
    if style.positions == "learned":
        views |= modules({"model.backbone.positions.table": f"{model}.wpe"})
    head = plain({"lm_head.weight": "lm_head.weight"} if not c["tie_word_embeddings"] else {})
    return views | head | plain({"lm_head.bias": "lm_head.bias"} if style.head_bias else {})


def norm_views(style: BlockStyle, names: dict[str, str]) -> Views:
    """Returns the views of norms: {our name: their name}."""
    bias = style.norm == "layer-bias" or (style.norm == "layer" and style.bias)
    return {} if style.norm.endswith("plain") else modules(names, bias)


def assembled(layers: Sequence[Views], outside: Views, theirs: str = "model.layers") -> Views:
    """Returns all views of a model. layers: the views of each layer, by our names in it and their names in theirs."""
    return outside | {
        f"{layer_name(i)}.{name}": view._replace(name=f"{theirs}.{i}.{view.name}")
        for i, own in enumerate(layers) for name, view in own.items()
    }  # fmt: skip


def model_of(
    c: Fields, layers: Sequence[Layer], style: BlockStyle, views: Sequence[Views], names: tuple[str, ...] = LLAMA,
    **sizes: Any,
) -> Model:  # fmt: skip
    """Returns a model with attention or MLPs, of layers with the views of each. names: as LLAMA; sizes: arguments of
    `shared`, of which heads and the width of MLPs have usual fields."""
    usual = {"num_heads": "num_attention_heads", "intermediate_size": "intermediate_size"}
    sizes = {ours: c[theirs] for ours, theirs in usual.items() if ours not in sizes} | sizes
    all_views = assembled(views, outer_views(c, style, names), f"{names[0]}.{names[-1]}")
    return Model(shared(c, layers, style, **sizes), all_views)


def plain(names: dict[str, str], **options: Any) -> Views:
    """Returns the views of whole tensors: {our name: their name}. options: fields of `View`."""
    return {our: View(their, **options) for our, their in names.items()}


def named(ours: str, theirs: str, pairs: dict[str, str], **options: Any) -> Views:
    """Returns the views of whole tensors: {our name: their name} below two prefixes. options: fields of `View`."""
    return {f"{ours}.{our}": View(f"{theirs}.{their}", **options) for our, their in pairs.items()}


def modules(names: dict[str, str], bias: bool = False) -> Views:
    """Returns the views of the weights of modules, and of their biases: {our name: their name}."""
    return plain({f"{our}.{kind}": f"{their}.{kind}" for our, their in names.items() for kind in kinds_of(bias)})


def kinds_of(bias: bool) -> tuple[str, ...]:
    """Returns the parameters of a module."""
    return ("weight", "bias") if bias else ("weight",)


def stacked(name: str, sizes: dict[str, int], groups: int = 1) -> Views:
    """Returns the views of parts that are stacked along the rows of one tensor, within each of several groups. sizes:
    the number of rows of each part, in all groups together."""
    each, start, views = sum(sizes.values()) // groups, 0, {}
    for part, size in sizes.items():
        views[part] = View(name, Block(groups, each, start, size // groups))
        start += size // groups
    return views


def projections(ours: str, theirs: str, sizes: dict[str, int], groups: int = 1, bias: bool = False) -> Views:
    """Returns the views of projections that are stacked in one of theirs. ours: what is before {part}_proj; sizes,
    groups: as in `stacked`."""
    return {
        f"{ours}.{part}_proj.{kind}": view
        for kind in kinds_of(bias) for part, view in stacked(f"{theirs}.{kind}", sizes, groups).items()
    }  # fmt: skip


def below(prefix: str, views: Views) -> Views:
    """Returns the views with a prefix before our names."""
    return {f"{prefix}.{name}": view for name, view in views.items()}


def conv_width(c: Fields, name: str) -> int:
    """Returns the width of a short convolution, which InputError requires to be at least 2."""
    if c[name] < 2:
        c.refuse(name, "at least 2")
    return c[name]


def layer_name(i: int) -> str:
    return f"model.backbone.layers.{i}"
