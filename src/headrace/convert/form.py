"""What a format is: what its config.json means to us, and where our tensors stand in its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError

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
    """config: config.json -> the arguments of HeadraceConfig; describe: a HeadraceConfig -> config.json, what all
    formats share aside; layer: a HeadraceConfig -> the views of a layer; whole: those outside of layers."""

    architecture: str
    config: Callable[[Config], Config]
    describe: Callable[[Any], Config]
    layer: Callable[[Any], dict[str, View]]
    whole: dict[str, View]
    defaults: Config = field(default_factory=dict)


def shared(c: Config, norm_eps: str) -> Config:
    """What every config.json says alike."""
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "bos_token_id", "eos_token_id",
        "pad_token_id",
    )  # fmt: skip
    return {name: c[name] for name in names if name in c} | {"norm_eps": c[norm_eps]}


def demand(c: Config, **wanted: Any) -> None:
    """Raise InputError where a config asks for what we do not have."""
    for name, value in wanted.items():
        if c.get(name, value) != value:
            raise InputError(f"config.json has {name}={c[name]!r}; expected {value!r}: nothing else can be converted")


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
