"""The description of a foreign checkpoint format: what its fields mean, and where in it our tensors are."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..spec.attention import SoftmaxSpec
from ..spec.mixer import Spec
from ..spec.stack import BlockStyle, Decoder, Layer
from ..utils.errors import InputError
from ..utils.integrity import short
from .fields import Config, Fields
from .files import Tensors
from .fp8 import ScaledBlocks, block_of
from .views import LLAMA, NORMS, NORMS_OF_ORDER, Views, assembled, mlp_views, norm_views, outer_views

PRECISIONS = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
)}  # fmt: skip


class Model(NamedTuple):
    """A foreign model in our terms."""

    arguments: Config  # of HeadraceConfig
    views: Views  # by the names of our parameters, or of parts of parameters (`slots`)
    outside: tuple[str, ...] = ()  # as `Format.outside`, by the fields
    copies: tuple[tuple[str, str], ...] = ()  # beginnings of the names of copies that may be stored, and of originals


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
        usual = CONFIG_MAPPING[described["model_type"]]().get_text_config()  # of transformers, where none is named
        return {"model_type": usual.model_type} | inner | outer

    def model(self, described: Config) -> tuple[Model, Fields]:
        """Returns the model that a config.json describes, and its fields. InputError for an unknown field or value."""
        fields = Fields(described, self.defaults, self.types)
        try:
            model = self.read(fields)
        except InputError as error:
            raise fields.explained(error) from None
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


Mixer = tuple[Spec | Layer, Views]  # the mixer of a layer, with its views; Layer: one that has more than a mixer


def model_of(
    c: Fields, mixers: Sequence[Mixer], style: BlockStyle, norms: dict[str, str] | None = None,
    dense: Views | None = None, *, experts: Views | None = None, which: Collection[int] | None = None,
    names: tuple[str, ...] = LLAMA, **sizes: Any,
) -> Model:  # fmt: skip
    """Returns a model of blocks of a mixer and an MLP or a mixture of experts.

    mixers: the pattern of its mixers; norms: {our name of a norm: theirs}, and dense: the views of an MLP; None: by
    Llama's names; experts: the views of the style's mixture, in the layers `which`; None: in all; names: as LLAMA;
    sizes: arguments of `shared`, of which heads and the width of MLPs have usual fields."""
    depth, mixture = sizes.get("num_hidden_layers") or c["num_hidden_layers"], style.experts
    sparse = [mixture is not None and (which is None or i in which) for i in range(depth)]
    if mixture and mixture.width and all(sparse):
        c.ignore("intermediate_size")  # of an MLP, which no layer has
        sizes = {"intermediate_size": mixture.width} | sizes
    usual = {"num_heads": "num_attention_heads", "intermediate_size": "intermediate_size"}
    sizes = {ours: c[theirs] for ours, theirs in usual.items() if ours not in sizes} | sizes
    common = norm_views(style, NORMS_OF_ORDER.get(style.order, NORMS) if norms is None else norms)
    mlps = {False: mlp_views("mlp", style) if dense is None else dense, True: experts or {}}
    layers, views = [], []
    for i, has_experts in enumerate(sparse):
        mixer, own = mixers[i % len(mixers)]
        layer = mixer if isinstance(mixer, Layer) else Layer(mixer)
        layers.append(replace(layer, mlp="experts") if has_experts else layer)
        views.append(common | own | mlps[has_experts])
    arguments = shared(c, layers, style, **sizes)
    for mixer in (mixer for layer in layers for mixer in layer.mixers):
        mixer.head_dims(arguments["hidden_size"], arguments["num_heads"])  # raises for sizes that do not divide
    return Model(arguments, assembled(views, outer_views(c, style, names), f"{names[0]}.{names[-1]}"))
