"""Rotary positions as transformers describes them."""

import math
from dataclasses import replace
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..spec.attention import ROPES, Rope
from .fields import Config, Fields
from .parts import is_positive

ORIGINAL = "original_max_position_embeddings"
# Our fields of rotary positions -> theirs.
ROPE_NAMES = {
    "factor": "factor", "original": ORIGINAL, "amplitude": "attention_factor",
    "slow": "beta_slow", "fast": "beta_fast", "truncate": "truncate", "short": "short_factor", "long": "long_factor",
}  # fmt: skip
LLAMA3_NAMES = ROPE_NAMES | {"slow": "low_freq_factor", "fast": "high_freq_factor"}
MSCALES = ("mscale", "mscale_all_dim")
MULTIMODAL = ("mrope_section", "mrope_interleaved")  # of images; a text has one position in all sections


def rotation(c: Fields, head_dim: int, partial: bool = False, parameters: Config | None = None) -> Rope:
    """Returns the frequencies of rotary positions, without their base, as transformers reads them.

    partial: whether the model reads partial_rotary_factor; other models ignore it. parameters: of one kind of layers;
    None: those of all."""
    given: Config = dict(c["rope_parameters"] if parameters is None else parameters)
    kind: Any = str(given.pop("rope_type", "default"))
    part = given.pop("partial_rotary_factor", 1.0)
    mscales = [given.pop(name, None) for name in MSCALES if kind == "yarn"]
    original = given.get(ORIGINAL, 1) if kind in ("llama3", "yarn", "longrope") else 1
    if not all(map(is_positive, (part, original, *filter(None, (given.get("factor"), *mscales))))):
        c.refuse("rope_parameters", "positive numbers as factors and lengths")
    names = LLAMA3_NAMES if kind == "llama3" else ROPE_NAMES
    known = {"rope_theta", "type", *MULTIMODAL, *(names[name] for name in ROPES.get(kind, ()))}
    others = {name: value for name, value in given.items() if name not in known}  # such as attn_factor, of llama.cpp
    unread = any(c.mentions(name, ROPE_INIT_FUNCTIONS.get(kind)) for name in others)
    if kind not in ROPES or unread or (part != 1 and kind != "default" and not partial):
        c.refuse("rope_parameters", f"a rope_type of {', '.join(ROPES)} with its own parameters")
    c.passed |= {f"rope_parameters.{name}": value for name, value in others.items()}
    c.ignore(ORIGINAL)  # a number beside the parameters, as in Phi-3's config.json, has replaced the one among them
    if "truncate" in given:  # null, too, is no truncation
        given["truncate"] = bool(given["truncate"])
    values = {name: given[names[name]] for name in ROPES[kind] if given.get(names[name]) is not None}
    if kind == "dynamic":
        values["original"] = c["max_position_embeddings"]
    elif kind in ("yarn", "longrope") and "factor" not in values:
        values["factor"] = c["max_position_embeddings"] / values["original"]
    if mscales and all(mscales) and "amplitude" not in values:
        above, below = (mscale(values["factor"], weight) for weight in mscales)
        values["amplitude"] = above / below
    return Rope(kind, dims=None if part == 1 or not partial else int(head_dim * part), **values)


def mscale(factor: float, weight: float) -> float:
    """Returns YaRN's amplitude of rotated channels, with a weight, for sequences that are longer by a factor."""
    return 1 + 0.1 * weight * math.log(max(factor, 1))


def latent_scale(c: Fields, rope: Rope, head_dim: int) -> Any:
    """Returns the scale of the logits in DeepSeek-V3, where mscale_all_dim is the weight of an amplitude of q and of
    k. `rotation` refuses it for another rope_type than yarn."""
    weight = c["rope_parameters"].get("mscale_all_dim")
    return head_dim**-0.5 * mscale(rope.factor, weight) ** 2 if weight else "key"


def rope_parameters(rope: Rope, theta: float) -> Config:
    """Returns transformers' parameters of rotary positions."""
    names = LLAMA3_NAMES if rope.kind == "llama3" else ROPE_NAMES
    values = {names[name]: getattr(rope, name) for name in ROPES[rope.kind] if getattr(rope, name) is not None}
    if rope.kind == "dynamic":  # which has max_position_embeddings
        values.pop(ORIGINAL)
    return values | {"rope_theta": theta, "rope_type": rope.kind}


def own_rotation(c: Fields, head_dim: int, parameters: Config) -> Rope:
    """Returns the frequencies of one kind of layers, with their base. InputError for truncate=false, which transformers
    does not read there."""
    if not is_positive(theta := parameters.get("rope_theta")):
        c.refuse("rope_parameters", "a rope_theta of more than 0 for each kind of layers")
    if not parameters.get("truncate", True):
        c.refuse("rope_parameters", "truncate=true for each kind of layers, or none")
    return replace(rotation(c, head_dim, parameters=parameters), theta=float(theta))
