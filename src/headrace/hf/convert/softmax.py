"""The formats of transformers' models of softmax attention alone."""

from typing import Any

from ...spec.attention import AttentionSpec, Rope
from ...spec.stack import BlockStyle, Layer
from .fields import Config, Fields
from .form import SWIGLU, Format, Model, layer_name, named, shared, whole

NORMS = {"mixer_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
PROJECTIONS = {f"mixer.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"}


def llama(c: Fields) -> Model:
    H, D = c["num_attention_heads"], c["hidden_size"]
    if c["head_dim"] != D // H:
        c.refuse("head_dim", repr(D // H))
    c.only("hidden_act", "silu", "swish")
    c.only("attention_bias", False)
    c.only("mlp_bias", False)
    c.ignore("pretraining_tp")
    kv_heads = None if c["num_key_value_heads"] == H else c["num_key_value_heads"]
    layers = [Layer(AttentionSpec(kv_heads=kv_heads, rope=rotation(c, c["head_dim"])))] * c["num_hidden_layers"]
    sizes = {"num_heads": H, "intermediate_size": c["intermediate_size"], "rope_theta": rope_theta(c)}
    views = whole("model", "embed_tokens", "norm", c["tie_word_embeddings"])
    for i in range(len(layers)):
        views |= named(layer_name(i), f"model.layers.{i}", PROJECTIONS | NORMS | SWIGLU)
    return Model(shared(c, layers, BlockStyle(), **sizes), views)


def rotation(c: Fields, head_dim: int) -> Rope:
    """The frequencies of rotary positions, without their base."""
    given: Config = c["rope_parameters"] or {}
    if given.keys() - {"rope_theta", "rope_type", "partial_rotary_factor"} or given.get("rope_type") != "default":
        c.refuse("rope_parameters", "rope_type='default'")
    dims = int(head_dim * given.get("partial_rotary_factor", 1.0))
    return Rope(dims=None if dims == head_dim else dims)


def rope_theta(c: Fields) -> float:
    """The base of rotary positions."""
    return c["rope_parameters"]["rope_theta"]


def llama_describe(config: Any) -> Config:
    spec = config.mixers[0]
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": spec.kv_heads or config.num_heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "max_position_embeddings": config.max_position_embeddings,
    }


FORMATS: dict[str, Format] = {"llama": Format("LlamaForCausalLM", llama, llama_describe, AttentionSpec)}
