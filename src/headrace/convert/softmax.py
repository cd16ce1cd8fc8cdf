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
from .form import PRECISIONS, Format, Model, View, Views, assembled, model_of, named, plain, shared, stacked, whole
from .parts import NORMS, mlp_views

BRANCH_NORMS = {
    "mixer_norm.weight": "post_attention_layernorm.weight", "mlp_norm.weight": "post_feedforward_layernorm.weight",
}  # fmt: skip
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
    alone, both = ("weight",), ("weight", "bias")
    biased = spec.bias in (True, "qkv")
    modules = {f"{name}_proj": both if biased else alone for name in ("qkvg" if spec.gated else "qkv")}
    modules["o_proj"] = both if spec.bias in (True, "o") else alone
    if spec.qk_norm != "none":
        modules |= {"q_norm": alone, "k_norm": alone}
    return {
        f"mixer.{name}.{kind}": View(f"{theirs}.{renamed.get(name, name)}.{kind}")
        for name, kinds in modules.items() for kind in kinds
    }  # fmt: skip


def activation(c: Fields, name: str, kinds: dict[str, str]) -> Any:
    """Returns the kind of MLP with an activation."""
    if c[name] not in kinds:
        c.refuse(name, " or ".join(map(repr, kinds)))
    return kinds[c[name]]


def windows(c: Fields) -> list[Pattern | None]:
    """Returns the pattern of each layer by layer_types."""
    kinds, patterns = c["layer_types"], dict[str, Pattern | None](full_attention=None)
    if (window := c["sliding_window"]) is not None:
        patterns["sliding_attention"] = window_of(c)
    if len(kinds) != c["num_hidden_layers"] or {*kinds} - patterns.keys():
        c.refuse("layer_types", f"num_hidden_layers of {' and '.join(patterns)}, with sliding_window={window}")
    return [patterns[kind] for kind in kinds]


def window_of(c: Fields) -> Pattern | None:
    """Returns the pattern of a window of sliding_window tokens, with the token itself, as transformers counts them."""
    window = c["sliding_window"]
    if window is not None and window < 1:
        c.refuse("sliding_window", "at least 1")
    return None if window is None else Pattern(window=window)


# --- models ----------------------------------------------------------------------------------------------------------


def decoder(c: Fields, specs: Sequence[AttentionSpec], style: BlockStyle, norms: dict[str, str] = NORMS) -> Model:
    """Returns a model with Llama's names of modules. norms: {our name of a norm: theirs}."""
    common = plain(norms) | mlp_views("mlp", style)
    views = [common | attention_views(spec, "self_attn") for spec in specs]
    return model_of(c, [Layer(spec) for spec in specs], style, views)


def llama(c: Fields) -> Model:
    c.ignore("pretraining_tp")
    style = BlockStyle(mlp=activation(c, "hidden_act", GATED), bias=c["mlp_bias"])
    return decoder(c, [attention(c, bias=c["attention_bias"])] * c["num_hidden_layers"], style)


def mistral(c: Fields) -> Model:
    """With layer_types, transformers takes it for a Ministral, some of whose layers have a window."""
    style, spec = BlockStyle(mlp=activation(c, "hidden_act", GATED)), attention(c)
    listed = c.get("layer_types") is not None
    patterns = windows(c) if listed else [window_of(c)] * c["num_hidden_layers"]
    return decoder(c, [replace(spec, pattern=pattern) for pattern in patterns], style)


def qwen2(c: Fields) -> Model:
    return windowed(c, attention(c, bias="qkv"))


def qwen3(c: Fields) -> Model:
    return windowed(c, attention(c, bias=c["attention_bias"], qk_norm="head"))


def windowed(c: Fields, spec: AttentionSpec) -> Model:
    """Returns a model of Qwen, some of whose layers have a window."""
    c.ignore("use_sliding_window", "max_window_layers")  # by which their class has set sliding_window and layer_types
    style = BlockStyle(mlp=activation(c, "hidden_act", GATED))
    return decoder(c, [replace(spec, pattern=pattern) for pattern in windows(c)], style)


def olmo2(c: Fields) -> Model:
    spec = attention(c, bias=c["attention_bias"], qk_norm="joint")
    style = BlockStyle(order="branch", mlp=activation(c, "hidden_act", GATED))
    return decoder(c, [spec] * c["num_hidden_layers"], style, BRANCH_NORMS)


def gemma(c: Fields) -> Model:
    c.only("use_bidirectional_attention", None, False)
    style = BlockStyle("rms-offset", mlp=activation(c, "hidden_act", GATED), embedding_scale=embedding_factor(c))
    return decoder(c, [attention(c, bias=c["attention_bias"])] * c["num_hidden_layers"], style)


def embedding_factor(c: Fields) -> float:
    """Returns Gemma's factor of the embeddings, rounded to the dtype of the weights."""
    return float(torch.tensor(c["hidden_size"] ** 0.5, dtype=PRECISIONS.get(c.get("dtype"), torch.float32)))


def gpt2(c: Fields) -> Model:
    c.only("add_cross_attention", False)
    c.ignore("reorder_and_upcast_attn", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    c.ignore(*(f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
    D, H, depth = c["n_embd"], c["n_head"], c["n_layer"]
    scales: list[Any] = ["key" if c["scale_attn_weights"] else "one"] * depth
    if c["scale_attn_by_inverse_layer_idx"]:
        scales = [(1.0 if scale == "one" else (D // H) ** -0.5) / (i + 1) for i, scale in enumerate(scales)]
    layers = [Layer(AttentionSpec(rotary=False, bias=True, scale=scale)) for scale in scales]
    style = BlockStyle("layer", mlp=activation(c, "activation_function", UNGATED), bias=True, positions="learned")
    sizes = {
        "hidden_size": D, "num_hidden_layers": depth, "num_heads": H, "intermediate_size": c["n_inner"] or 4 * D,
        "max_position_embeddings": c["n_positions"],
    }  # fmt: skip
    views = whole("transformer", "wte", "ln_f", c["tie_word_embeddings"])
    views |= named("model.backbone", "transformer", {"norm.bias": "ln_f.bias", "positions.table.weight": "wpe.weight"})
    own = plain(GPT2_BIASES) | plain(GPT2_MATRICES, transposed=True)
    for kind, transposed in (("weight", True), ("bias", False)):
        for part, view in stacked(f"attn.c_attn.{kind}", dict.fromkeys("qkv", D)).items():
            own[f"mixer.{part}_proj.{kind}"] = view._replace(transposed=transposed)
    return Model(shared(c, layers, style, **sizes), assembled([own] * depth, views, "transformer.h"))


GPT2_MATRICES = {
    "mixer.o_proj.weight": "attn.c_proj.weight", "mlp.up_proj.weight": "mlp.c_fc.weight",
    "mlp.down_proj.weight": "mlp.c_proj.weight",
}  # fmt: skip
GPT2_BIASES = {our.replace("weight", "bias"): their.replace("weight", "bias") for our, their in GPT2_MATRICES.items()}
GPT2_BIASES |= {f"mixer_norm.{kind}": f"ln_1.{kind}" for kind in ("weight", "bias")}
GPT2_BIASES |= {f"mlp_norm.{kind}": f"ln_2.{kind}" for kind in ("weight", "bias")}


FORMATS: dict[str, Format] = {
    "llama": Format("LlamaForCausalLM", llama),
    "mistral": Format("MistralForCausalLM", mistral),
    "qwen2": Format("Qwen2ForCausalLM", qwen2),
    "qwen3": Format("Qwen3ForCausalLM", qwen3),
    "olmo2": Format("Olmo2ForCausalLM", olmo2),
    "gemma": Format("GemmaForCausalLM", gemma),
    "gpt2": Format("GPT2LMHeadModel", gpt2, renamed=("transformer.", ""), buffers=(".attn.bias", ".attn.masked_bias")),
}
