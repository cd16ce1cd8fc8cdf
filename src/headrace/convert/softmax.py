"""The formats of transformers' models of softmax attention alone, and what hybrids share with them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..spec.attention import ROPES, AttentionSpec, Pattern, Rope
from ..spec.stack import BlockStyle, Layer
from .fields import Config, Fields
from .form import LLAMA, PRECISIONS, Format, Model, Views, model_of, modules, norm_views
from .parts import NORMS, mlp_views

BRANCH_NORMS = {"mixer_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
# Names of activations -> kinds of MLP.
GATED = {"swish": "swiglu", "silu": "swiglu", "gelu": "geglu", "gelu_new": "geglu-tanh"}
GATED["gelu_pytorch_tanh"] = "geglu-tanh"
UNGATED = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu"}
UNGATED |= {"relu2": "relu2", "gelu_fast": "gelu-tanh"}  # the latter has ten digits of a constant

# --- rotary positions ------------------------------------------------------------------------------------------------

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

    partial: whether the model knows a part of the channels that rotates; other models ignore the field. parameters: of
    one kind of layers; None: those of all."""
    given: Config = dict((c["rope_parameters"] or {}) if parameters is None else parameters)
    kind, part = given.pop("rope_type", "default"), given.pop("partial_rotary_factor", 1.0)
    mscales = [given.pop(name, None) for name in MSCALES if kind == "yarn"]
    if not all(isinstance(factor, (int, float)) for factor in (part, *filter(None, mscales))):
        c.refuse("rope_parameters", "numbers as factors")
    names = LLAMA3_NAMES if kind == "llama3" else ROPE_NAMES
    known = {"rope_theta", "type", *MULTIMODAL, *(names[name] for name in ROPES.get(kind, ()))}
    others = {name: value for name, value in given.items() if name not in known}  # such as attn_factor, of llama.cpp
    unread = any(c.mentions(name, ROPE_INIT_FUNCTIONS.get(kind)) for name in others)
    if kind not in ROPES or unread or (part != 1 and kind != "default" and not partial):
        c.refuse("rope_parameters", f"a rope_type of {', '.join(ROPES)} with its own parameters")
    c.passed |= {f"rope_parameters.{name}": value for name, value in others.items()}
    if kind in ("llama3", "yarn", "longrope"):  # a number beside them counts, as Phi-3 was released
        given[ORIGINAL] = c.get(ORIGINAL, given.get(ORIGINAL))
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
    k."""
    weight = c["rope_parameters"].get("mscale_all_dim")
    return head_dim**-0.5 * mscale(rope.factor, weight) ** 2 if weight and rope.kind == "yarn" else "key"


def rope_parameters(rope: Rope, theta: float) -> Config:
    """Returns transformers' parameters of rotary positions."""
    names = LLAMA3_NAMES if rope.kind == "llama3" else ROPE_NAMES
    values = {names[name]: getattr(rope, name) for name in ROPES[rope.kind] if getattr(rope, name) is not None}
    if rope.kind == "dynamic":  # which has max_position_embeddings
        values.pop(ORIGINAL)
    return values | {"rope_theta": rope.theta or theta, "rope_type": rope.kind}


# --- layers ----------------------------------------------------------------------------------------------------------


def attention(c: Fields, partial: bool = False, **options: Any) -> AttentionSpec:
    """Returns the spec of attention by the fields that most formats share. partial: as in `rotation`; options: the
    spec's other fields."""
    H, D = c["num_attention_heads"], c["hidden_size"]
    groups, d = c.get("num_key_value_heads") or H, c.get("head_dim") or D // H
    heads: Config = {"kv_heads": None if groups == H else groups, "head_dim": None if d * H == D else d}
    positions = rotation(c, d, partial) if options.get("rotary", True) else Rope()
    return AttentionSpec(**heads, rope=positions, **options)


def attention_views(spec: AttentionSpec, theirs: str, **renamed: str) -> Views:
    """Returns the views of a layer of attention below the module `theirs`. renamed: their names of modules that they
    call otherwise than we do."""

    def views(names: Sequence[str], bias: bool) -> Views:
        return modules({f"mixer.{name}": f"{theirs}.{renamed.get(name, name)}" for name in names}, bias)

    inputs = [f"{name}_proj" for name in ("qkvg" if spec.gated else "qkv")]
    norms = ["q_norm", "k_norm"] if spec.qk_norm != "none" else []
    return views(inputs, spec.bias in (True, "qkv")) | views(["o_proj"], spec.bias in (True, "o")) | views(norms, False)


def activation(c: Fields, name: str, kinds: dict[str, str]) -> Any:
    """Returns the kind of MLP with an activation."""
    if c[name] not in kinds:
        c.refuse(name, " or ".join(map(repr, kinds)))
    return kinds[c[name]]


def gated_style(c: Fields, **options: Any) -> BlockStyle:
    """Returns a style with gated MLPs. options: its other fields."""
    return BlockStyle(mlp=activation(c, "hidden_act", GATED), **options)


def windows(c: Fields) -> list[Pattern | None]:
    """Returns the pattern of each layer by layer_types."""
    kinds, patterns = c["layer_types"], dict[str, Pattern | None](full_attention=None)
    if (window := c["sliding_window"]) is not None:
        patterns["sliding_attention"] = window_of(c)
    if len(kinds) != c["num_hidden_layers"] or {*kinds} - patterns.keys():
        c.refuse("layer_types", f"num_hidden_layers of {' and '.join(patterns)}, with sliding_window={window}")
    return [patterns[kind] for kind in kinds]


def windowed(c: Fields, spec: AttentionSpec, alone: AttentionSpec | None = None) -> list[AttentionSpec]:
    """Returns the spec of each layer by layer_types. alone: that of layers without a window; None: the same."""
    return [replace(spec, pattern=each) if each or alone is None else alone for each in windows(c)]


def window_of(c: Fields, limited: bool = False) -> Pattern | None:
    """Returns the pattern of a window of sliding_window tokens, with the token itself, as transformers counts them.

    limited: whether a window of at least max_position_embeddings tokens is none."""
    window = c["sliding_window"]
    if window is not None and window < 1:
        c.refuse("sliding_window", "at least 1")
    if window is None or (limited and window >= c["max_position_embeddings"]):
        return None
    return Pattern(window=window)


# --- models ----------------------------------------------------------------------------------------------------------


def decoder(
    c: Fields, specs: Sequence[AttentionSpec], style: BlockStyle, own: Views, names: tuple[str, ...] = LLAMA,
    **sizes: Any,
) -> Model:  # fmt: skip
    """Returns a model whose layers all have the same views. specs: the pattern of its mixers; names, sizes: as in
    `model_of`."""
    depth = sizes.get("num_hidden_layers") or c["num_hidden_layers"]
    layers = [Layer(specs[i % len(specs)]) for i in range(depth)]
    return model_of(c, layers, style, [own] * depth, names, **sizes)


def named_as_llama(
    c: Fields, specs: Sequence[AttentionSpec], style: BlockStyle, norms: dict[str, str] = NORMS, **sizes: Any
) -> Model:
    """The same with Llama's names of modules. norms: {our name of a norm: theirs}."""
    own = norm_views(style, norms) | mlp_views("mlp", style) | attention_views(specs[0], "self_attn")
    return decoder(c, specs, style, own, **sizes)


def gated(c: Fields, specs: Sequence[AttentionSpec], norms: dict[str, str] = NORMS, order: Any = "pre") -> Model:
    """The same with gated MLPs."""
    style = gated_style(c, order=order, bias=bool(c.of_class("mlp_bias")))
    return named_as_llama(c, specs, style, norms)


def llama(c: Fields) -> Model:
    c.ignore("pretraining_tp")
    return gated(c, [attention(c, bias=c["attention_bias"])])


def mistral(c: Fields) -> Model:
    """With layer_types, transformers takes it for a Ministral, some of whose layers have a window."""
    spec = attention(c)
    return gated(c, windowed(c, spec) if c.get("layer_types") is not None else [replace(spec, pattern=window_of(c))])


def qwen2(c: Fields) -> Model:
    return qwen(c, attention(c, bias="qkv"))


def qwen3(c: Fields) -> Model:
    return qwen(c, attention(c, bias=c["attention_bias"], qk_norm="head"))


def qwen(c: Fields, spec: AttentionSpec) -> Model:
    """Returns a model of Qwen, some of whose layers have a window."""
    c.ignore("use_sliding_window", "max_window_layers")  # by which their class has set sliding_window and layer_types
    return gated(c, windowed(c, spec))


def olmo2(c: Fields) -> Model:
    return gated(c, [attention(c, bias=c["attention_bias"], qk_norm="joint")], BRANCH_NORMS, "branch")


def gemma(c: Fields) -> Model:
    c.only("use_bidirectional_attention", None, False)
    style = gated_style(c, norm="rms-offset", embedding_scale=embedding_factor(c))
    return named_as_llama(c, [attention(c, bias=c["attention_bias"])], style)


def embedding_factor(c: Fields) -> float:
    """Returns Gemma's factor of the embeddings, rounded to the dtype of the weights."""
    return float(torch.tensor(c["hidden_size"] ** 0.5, dtype=PRECISIONS.get(c.get("dtype"), torch.float32)))


FORMATS: dict[str, Format] = {
    "llama": Format("LlamaForCausalLM", llama),
    "mistral": Format("MistralForCausalLM", mistral),
    "qwen2": Format("Qwen2ForCausalLM", qwen2),
    "qwen3": Format("Qwen3ForCausalLM", qwen3),
    "olmo2": Format("Olmo2ForCausalLM", olmo2),
    "gemma": Format("GemmaForCausalLM", gemma),
}
