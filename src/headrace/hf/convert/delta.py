"""The formats of transformers' hybrids of delta rules and softmax attention."""

from typing import Any

from ... import zoo
from ...spec.linear import MixerSpec
from ...spec.stack import BlockStyle, Layer
from .fields import Config, Fields
from .form import SWIGLU, Format, Model, Views, below, conv_width, layer_name, named, shared, stacked, whole

NORMS = {"mixer_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
DELTA = {
    "mixer.decay.A_log": "A_log", "mixer.decay.dt_bias": "dt_bias", "mixer.norm_weight": "norm.weight",
    "mixer.o_proj.weight": "out_proj.weight",
}  # fmt: skip
OF_ATTENTION = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "rope_parameters", "rope_theta",
    "rope_scaling", "partial_rotary_factor",
)  # fmt: skip
OF_EXPERTS = (
    "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob",
    "output_router_logits", "router_aux_loss_coef",
)  # fmt: skip


def qwen3_next(c: Fields) -> Model:
    depth = c["num_hidden_layers"]
    c.only("layer_types", ["linear_attention"] * depth)
    c.only("hidden_act", "silu", "swish")
    if (step := c["decoder_sparse_step"]) < 1:
        c.refuse("decoder_sparse_step", "at least 1")
    if {*range(step - 1, depth, step)} - {*(c["mlp_only_layers"] or [])}:
        c.only("num_experts", 0)
    c.ignore("num_experts", "full_attention_interval", *OF_ATTENTION, *OF_EXPERTS)
    H = c["linear_num_value_heads"]
    groups, K, V = c["linear_num_key_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
    layers = [Layer(gated_delta(c, H, groups, K, V))] * depth
    views = whole("model", "embed_tokens", "norm", c["tie_word_embeddings"], 1.0)
    for i in range(depth):
        theirs = f"model.layers.{i}"
        views |= named(layer_name(i), theirs, NORMS, offset=1.0)  # Qwen3-Next stores norm weights minus 1
        views |= named(layer_name(i), theirs, SWIGLU)
        views |= named(layer_name(i), f"{theirs}.linear_attn", DELTA)
        views |= below(layer_name(i), qwen_projections(f"{theirs}.linear_attn", H, groups, K, V))
    sizes = {"num_heads": H, "intermediate_size": c["intermediate_size"]}
    return Model(shared(c, layers, BlockStyle(), **sizes), views)


def gated_delta(c: Fields, heads: int, groups: int, key_dim: int, value_dim: int) -> Any:
    """Returns the spec of Gated DeltaNet with these heads."""
    D, conv = c["hidden_size"], conv_width(c, "linear_conv_kernel_dim")
    widths = f"heads.expand_k={key_dim * heads / D}, heads.expand_v={value_dim * heads / D}"
    shared_by = "none" if groups == heads else groups
    return zoo.get(f"gated-deltanet({widths}, heads.qk_groups={shared_by}, heads.count={heads}, inputs.conv={conv})")


def qwen_projections(theirs: str, heads: int, groups: int, key_dim: int, value_dim: int) -> Views:
    """Projections are grouped by key head: q and k of the head, then v and gate of the value heads that share it."""
    wide, narrow = heads * value_dim, groups * key_dim
    sizes = {"q": narrow, "k": narrow, "v": wide, "gate": wide}
    views = stacked(f"{theirs}.in_proj_qkvz.weight", sizes, groups)
    views |= stacked(f"{theirs}.in_proj_ba.weight", {"beta": heads, "decay": heads}, groups)
    conv = stacked(f"{theirs}.conv1d.weight", {part: sizes[part] for part in "qkv"})
    return below("mixer.in_proj", views) | below("mixer.conv.weight", conv)


def qwen_describe(config: Any) -> Config:
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    return {
        "linear_num_value_heads": H, "linear_num_key_heads": spec.heads.qk_groups or H,
        "linear_key_head_dim": K, "linear_value_head_dim": V,
        "linear_conv_kernel_dim": spec.inputs.conv,
        "rms_norm_eps": config.norm_eps, "intermediate_size": config.intermediate_size, "num_experts": 0,
        "layer_types": ["linear_attention"] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip


FORMATS: dict[str, Format] = {
    "qwen3_next": Format(
        "Qwen3NextForCausalLM", qwen3_next, qwen_describe, MixerSpec,
        # transformers takes the number of tokens so far from a layer of softmax attention
        cache=lambda config: any(spec.facts.cached for spec in config.mixers),
    ),
}  # fmt: skip
