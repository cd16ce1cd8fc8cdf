"""The formats of transformers' models of softmax attention alone, and what hybrids share with them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..spec.attention import AttentionSpec, Pattern, Rope
from ..spec.stack import BlockStyle
from .fields import Config, Fields
from .form import Format, Mixer, Model, model_of
from .rotary import rotation
from .views import Views, modules, projections

# Names of activations -> kinds of MLP.
GATED = {"swish": "swiglu", "silu": "swiglu", "gelu": "geglu", "gelu_new": "geglu-tanh"}
GATED["gelu_pytorch_tanh"] = "geglu-tanh"
UNGATED = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu"}
UNGATED |= {"relu2": "relu2", "gelu_fast": "gelu-tanh"}  # the latter has ten digits of a constant

# --- layers ----------------------------------------------------------------------------------------------------------


def attention(c: Fields, partial: bool = False, parameters: Config | None = None, **options: Any) -> AttentionSpec:
    """Returns the spec of attention by the fields that most formats share. partial, parameters: as in `rotation`;
    options: the spec's other fields."""
    H, D = c["num_attention_heads"], c["hidden_size"]
    groups, d = c.of_class("num_key_value_heads") or H, c.get("head_dim") or D // H
    heads: Config = {"kv_heads": None if groups == H else groups, "head_dim": None if d * H == D else d}
    positions = rotation(c, d, partial, parameters) if options.get("rotary", True) else Rope()
    return AttentionSpec(**heads, rope=positions, **options)


def attention_views(spec: AttentionSpec, theirs: str, **renamed: str) -> Views:
    """Returns the views of a layer of attention below the module `theirs`. renamed: their names of modules that they
    call otherwise than we do."""

    def views(names: Sequence[str], bias: bool) -> Views:
        return modules({f"mixer.{name}": f"{theirs}.{renamed.get(name, name)}" for name in names}, bias)

    inputs = [f"{name}_proj" for name in ("qkvg" if spec.gated else "qkv")]
    norms = ["q_norm", "k_norm"] if spec.qk_norm != "none" else []
    return views(inputs, spec.bias in (True, "qkv")) | views(["o_proj"], spec.bias in (True, "o")) | views(norms, False)


def fused(spec: AttentionSpec, sizes: tuple[int, int], inputs: str, output: str, grouped: bool = True) -> Views:
    """Returns the views of attention whose q, k and v are one projection. sizes: the hidden size and the number of
    heads; inputs, output: the projections; grouped: whether each head of k and v follows its heads of q."""
    H, (d, _) = sizes[1], spec.head_dims(*sizes)
    groups, bias = spec.kv_heads or H, bool(spec.bias)
    parts = {"q": H * d, "k": groups * d, "v": groups * d}
    views = projections("mixer", inputs, parts, groups if grouped else 1, bias)
    return views | modules({"mixer.o_proj": output}, bias)


def activation(c: Fields, name: str, kinds: dict[str, str]) -> Any:
    """Returns the kind of MLP with an activation."""
    if c[name] not in kinds:
        c.refuse(name, " or ".join(map(repr, kinds)))
    return kinds[c[name]]


def style_of(c: Fields, name: str = "hidden_act", kinds: dict[str, str] = GATED, **options: Any) -> BlockStyle:
    """Returns a style. name, kinds: the field and the kinds of its activation; options: the style's other fields."""
    return BlockStyle(mlp=activation(c, name, kinds), **options)


def windows(c: Fields) -> list[Pattern | None]:
    """Returns the pattern of each layer by layer_types."""
    kinds, patterns = c["layer_types"], dict[str, Pattern | None](full_attention=None)
    if (window := c["sliding_window"]) is not None:
        patterns["sliding_attention"] = window_of(c)
    if len(kinds) != c["num_hidden_layers"] or {*kinds} - patterns.keys():
        c.refuse("layer_types", f"num_hidden_layers of {' and '.join(patterns)}, with sliding_window={window}")
    return [patterns[kind] for kind in kinds]


def windowed(c: Fields, spec: AttentionSpec, alone: AttentionSpec | None = None) -> list[AttentionSpec]:
    """Returns the spec of each layer by layer_types. alone: the spec of layers without a window; None: `spec`."""
    return [alone if alone and each is None else replace(spec, pattern=each) for each in windows(c)]


def window_of(c: Fields, limited: bool = False) -> Pattern | None:
    """Returns the pattern of a window of sliding_window tokens, with the token itself, as transformers counts them.

    limited: whether a window of max_position_embeddings tokens or more counts as none."""
    if c["sliding_window"] is None:
        return None
    window = c.count("sliding_window", 1)
    return None if limited and window >= c["max_position_embeddings"] else Pattern(window=window)


# --- models ----------------------------------------------------------------------------------------------------------


def keyed(specs: Sequence[AttentionSpec]) -> list[Mixer]:
    """Returns the mixers with Llama's names of modules."""
    return [(spec, attention_views(spec, "self_attn")) for spec in specs]


def gated(c: Fields, specs: Sequence[AttentionSpec], order: Any = "pre", norms: dict[str, str] | None = None) -> Model:
    """Returns a model with gated MLPs. specs: the pattern of its mixers; norms: as in `model_of`."""
    return model_of(c, keyed(specs), style_of(c, order=order, bias=bool(c.of_class("mlp_bias"))), norms)


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
    return gated(c, [attention(c, bias=c["attention_bias"], qk_norm="joint")], "branch")


FORMATS: dict[str, Format] = {
    "llama": Format("LlamaForCausalLM", llama),
    "mistral": Format("MistralForCausalLM", mistral),
    "qwen2": Format("Qwen2ForCausalLM", qwen2),
    "qwen3": Format("Qwen3ForCausalLM", qwen3),
    "olmo2": Format("Olmo2ForCausalLM", olmo2),
}
