"""What a format is: what its config.json means to us, and where our tensors stand in its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from ...utils.errors import InputError
from ..config import TRANSFORMERS

Config = dict[str, Any]


class View(NamedTuple):
    """Where a tensor of ours stands: in `rows` of the tensor `name` of `height` rows (None: it is all of that), and
    `offset` less than here. # is the layer's number."""

    name: str
    rows: Tensor | None = None
    height: int = 0
    offset: float = 0.0


@dataclass(frozen=True)
class Format:
    """A foreign architecture, whose layers have `mixer`s of one kind.

    config: the fields of `read` -> the arguments of HeadraceConfig, beside those that all formats share
    describe: a HeadraceConfig -> the fields of config.json, beside the same
    layer: a HeadraceConfig -> the views of a layer; whole: those outside of layers
    read: the fields that `config` takes, with what the foreign library takes where config.json has none
    only: the fields that must have one of these values, the library's default first
    ignored: the fields that change no logits

    Any other field of a config.json is refused."""

    architecture: str
    mixer: type
    config: Callable[[Config], Config]
    describe: Callable[[Any], Config]
    layer: Callable[[Any], dict[str, View]]
    whole: dict[str, View]
    read: Config
    only: dict[str, tuple[Any, ...]]
    ignored: frozenset[str]

    def arguments(self, described: Config) -> Config:
        """config.json as the arguments of HeadraceConfig. Raises InputError for a field or value that is not known."""
        for name, value in described.items():
            if name not in self.read.keys() | self.only.keys() | self.ignored:
                raise InputError(
                    f"config.json has {name}={value!r}, which may change what the model computes; expected fields that "
                    f"the conversion from {self.architecture} knows"
                )
            if name in self.only:
                demand({name: value}, name, *self.only[name])
        given = self.read | {name: value for name, value in described.items() if name in self.read}
        same = {name: given[name] for name in SHARED if name in given}
        return same | {"norm_eps": given[next(name for name in NORM_EPS if name in given)]} | self.config(given)


# Fields that every config.json says alike, and what it calls the epsilon of the norms.
SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip
NORM_EPS = ("norm_eps", "rms_norm_eps", "layer_norm_epsilon")
# Fields of any config.json that change no logits: what transformers keeps, and how it initialises and generates.
COMMON = TRANSFORMERS | GenerationConfig().to_dict().keys() | {"initializer_range", "use_cache"}
COMMON -= {*SHARED, "quantization_config"}


def demand(c: Config, name: str, *wanted: Any) -> None:
    """Raise InputError where a config asks for what we do not have."""
    if c[name] not in wanted:
        expected = " or ".join(repr(value) for value in wanted)
        raise InputError(f"config.json has {name}={c[name]!r}; expected {expected}: nothing else can be converted")


def conv_size(c: Config, name: str) -> int:
    if c[name] < 2:
        raise InputError(f"config.json has {name}={c[name]!r}; expected at least 2: nothing else can be converted")
    return c[name]


def outside(prefix: str, embedding: str, norm: str, offset: float = 0.0) -> dict[str, View]:
    return {
        "model.embed_tokens.weight": View(f"{prefix}.{embedding}.weight"),
        "model.backbone.norm.weight": View(f"{prefix}.{norm}.weight", offset=offset),
        "lm_head.weight": View("lm_head.weight"),
    }


def named(prefix: str, pairs: dict[str, str]) -> dict[str, View]:
    return {ours: View(f"{prefix}.{theirs}") for ours, theirs in pairs.items()}


SWIGLU = {f"mlp.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def consecutive(name: str, sizes: dict[str, int]) -> dict[str, View]:
    """Views of tensors that stand below each other in one."""
    height = sum(sizes.values())
    parts = torch.arange(height).split(list(sizes.values()))
    return {part: View(name, rows, height) for part, rows in zip(sizes, parts, strict=True)}


def interleaved(name: str, groups: int, sizes: dict[str, int]) -> dict[str, View]:
    """As `consecutive`, in each of several groups that stand below each other."""
    each = sum(sizes.values())
    rows = torch.arange(groups * each).view(groups, each).split(list(sizes.values()), 1)
    return {part: View(name, r.flatten(), groups * each) for part, r in zip(sizes, rows, strict=True)}


def key_heads(spec: Any, heads: int) -> int:
    return spec.heads.qk_groups or heads


def conv_width(spec: Any) -> int:
    return spec.inputs.conv
