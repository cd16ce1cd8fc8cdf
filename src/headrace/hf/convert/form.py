"""The description of a foreign checkpoint format: the meaning of its config.json, and the places of our tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from sys import float_info
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...ops.checks import require
from ...spec.record import LARGEST
from ...utils.errors import InputError
from ...utils.integrity import misfit, short
from ..config import TRANSFORMERS

Config = dict[str, Any]


class View(NamedTuple):
    """The place of one of our tensors in a foreign checkpoint: `rows` of the tensor `name`, which has `height` rows
    (None: the whole tensor). Our values are the foreign ones plus `offset`. # in `name` is the index of the layer."""

    name: str
    rows: Tensor | None = None
    height: int = 0
    offset: float = 0.0


@dataclass(frozen=True)
class Format:
    """A foreign architecture with mixers of the class `mixer`. A field of config.json that is not in `read`, `only` or
    `ignored` is refused.

    config: maps the fields of `read` to arguments of HeadraceConfig, without those that all formats share (SHARED).
    describe: maps a HeadraceConfig to fields of config.json, without the same.
    layer: maps a HeadraceConfig to the views of a layer.
    whole: the views outside of layers.
    read: fields that `config` uses -> default of the foreign library.
    only: fields that must have one of these values, of which the first is the default of the foreign library.
    ignored: fields that do not affect the logits.
    cache: whether the foreign library can decode the model with its cache."""

    architecture: str
    mixer: type
    config: Callable[[Config], Config]
    describe: Callable[[Any], Config]
    layer: Callable[[Any], dict[str, View]]
    whole: dict[str, View]
    read: Config
    only: dict[str, tuple[Any, ...]]
    ignored: frozenset[str]
    cache: bool = True

    def check_values(self, described: Config, largest: int) -> None:
        """InputError for a value of `read` without the type of its field, and for a size of more than `largest`, the
        number of elements of the largest tensor."""
        for name in sorted(described.keys() & self.read.keys() - IDS):
            value, default = described[name], self.read[name]
            wrong = None if value == default else misfit(value, TYPES.get(name, type(default)), name)
            require(wrong is None, f"config.json has a value of another type: {wrong}")
            if type(value) is int and type(default) is not float:
                most = LARGEST if name in NOT_SIZES else largest
                least = int(name != "num_experts")
                within = value == default or least <= value <= most
                require(within, f"config.json has {name}={short(value)}; expected {least} to {most}")
            elif type(value) in (int, float):
                require(
                    abs(value) <= float_info.max, f"config.json has {name}={short(value)}; expected a finite number"
                )

    def arguments(self, described: Config) -> Config:
        """The arguments of HeadraceConfig for a config.json. InputError for an unknown field or value."""
        for name, value in described.items():
            if name not in self.read.keys() | self.only.keys() | self.ignored:
                raise InputError(
                    f"config.json has {name}={value!r}, which may change what the model computes; expected only "
                    f"fields known to the conversion from {self.architecture}"
                )
            if name in self.only:
                require_value({name: value}, name, *self.only[name])
        fields = self.read | {name: value for name, value in described.items() if name in self.read}
        same = {name: fields[name] for name in SHARED if name in fields}
        return same | {"norm_eps": fields[next(name for name in NORM_EPS if name in fields)]} | self.config(fields)


# The forms, as of `misfit`, of the fields of `read` whose default does not show the type.
TYPES: dict[str, Any] = {
    "num_key_value_heads": (int, None), "num_kv_heads": (int, None), "num_v_heads": (int, None),
    "head_dim": (int, None), "intermediate_size": (int, None), "hidden_ratio": (float, None),
    "rope_parameters": ({}, None), "rope_scaling": ({}, None),
    "layer_types": ([str], None), "mlp_only_layers": ([int], None), "time_step_limit": [(float, {})],
}  # fmt: skip
IDS = {"bos_token_id", "eos_token_id", "pad_token_id"}  # which HeadraceConfig checks
NOT_SIZES = {"max_position_embeddings", "num_hidden_layers"}  # fields that no tensor bounds
# Fields with one name in every format, and the names of the epsilon of the norms.
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip
NORM_EPS = ("norm_eps", "rms_norm_eps", "layer_norm_epsilon")
# Fields that do not affect the logits in any format: fields of transformers, of generation and of initialisation.
COMMON = TRANSFORMERS | GenerationConfig().to_dict().keys() | {"initializer_range", "use_cache"}
COMMON -= {*SHARED, "quantization_config"}


def require_value(c: Config, name: str, *convertible: Any) -> None:
    """InputError if a field of a config does not have one of the values that can be converted."""
    if c[name] not in convertible:
        expected = " or ".join(repr(value) for value in convertible)
        raise InputError(f"config.json has {name}={c[name]!r}; expected {expected}: nothing else can be converted")


def conv_size(c: Config, name: str) -> int:
    if c[name] < 2:
        raise InputError(f"config.json has {name}={c[name]!r}; expected at least 2: nothing else can be converted")
    return c[name]


def embedding_views(prefix: str, embedding: str, norm: str, offset: float = 0.0) -> dict[str, View]:
    return {
        "model.embed_tokens.weight": View(f"{prefix}.{embedding}.weight"),
        "model.backbone.norm.weight": View(f"{prefix}.{norm}.weight", offset=offset),
        "lm_head.weight": View("lm_head.weight"),
    }


def named(prefix: str, pairs: dict[str, str]) -> dict[str, View]:
    return {ours: View(f"{prefix}.{theirs}") for ours, theirs in pairs.items()}


SWIGLU = {f"mlp.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def consecutive(name: str, sizes: dict[str, int]) -> dict[str, View]:
    """Views of tensors that are stacked along the rows of one tensor."""
    height = sum(sizes.values())
    parts = torch.arange(height).split(list(sizes.values()))
    return {part: View(name, rows, height) for part, rows in zip(sizes, parts, strict=True)}


def interleaved(name: str, groups: int, sizes: dict[str, int]) -> dict[str, View]:
    """Views as `consecutive` within each of several groups, which are stacked along the rows."""
    each = sum(sizes.values())
    rows = torch.arange(groups * each).view(groups, each).split(list(sizes.values()), 1)
    return {part: View(name, r.flatten(), groups * each) for part, r in zip(sizes, rows, strict=True)}


def key_heads(spec: Any, heads: int) -> int:
    return spec.heads.qk_groups or heads
