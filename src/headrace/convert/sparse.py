"""The formats of transformers' models of experts, and of latent attention, without linear layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..extra.sparsemixer import NearExperts
from ..spec.attention import AttentionSpec
from ..spec.stack import Experts
from . import moe
from .delta import latent_spec
from .dense import LATE, hunyuan_spec
from .fields import Fields
from .form import Format, Mixer, Model, model_of
from .pairs import in_pairs
from .parts import as_granite, latent_attention, layer_types, multiplier
from .softmax import attention, keyed, style_of, window_of, windowed
from .views import gate_up_views, mlp_views

# --- DeepSeek --------------------------------------------------------------------------------------------------------


def deepseek_v2(c: Fields) -> Model:
    """Experts by a softmax, and groups of them by the best one."""
    c.only("norm_topk_prob", False, None)
    c.only("topk_method", "greedy", "group_limited_greedy")
    grouped = c["topk_method"] == "group_limited_greedy"
    c.ignore("n_group", "topk_group")
    shared = c.count("n_shared_experts") * c["moe_intermediate_size"]
    names = DEEPSEEK_V2 | ({"groups": "n_group", "chosen_groups": "topk_group"} if grouped else {})
    mixture = moe.mixture_of(c, names, balance=0.0, best=1, shared=shared or None)
    return sparse(c, [latent(c, True)], mixture, bias=c["mlp_bias"])


# Fields of Experts -> fields of DeepSeek-V2.
DEEPSEEK_V2 = {
    "count": "n_routed_experts", "chosen": "num_experts_per_tok", "width": "moe_intermediate_size",
    "scale": "routed_scaling_factor",
}  # fmt: skip


def deepseek_v3(c: Fields) -> Model:
    return moe.predicting(c, sparse(c, [latent(c, c["rope_interleave"])], moe.deepseek_experts(c)))


def youtu(c: Fields) -> Model:
    """DeepSeek-V3 without experts."""
    c.ignore("embedding_initializer_range")
    return sparse(c, [latent(c, c["rope_interleave"])])


def latent(c: Fields, pairs: bool) -> Mixer:
    """Returns latent attention. pairs: as in `latent_attention`."""
    c.ignore("head_dim", "qk_head_dim")  # which their class sets
    if c["rope_parameters"].get("partial_rotary_factor", 1) != 1:  # which some of the families ignore
        c.refuse("rope_parameters", "all channels of qk_rope_head_dim to rotate")
    spec = latent_spec(c)
    return spec, latent_attention("self_attn", spec, "o_proj", pairs)


# --- Attention with keys and values ----------------------------------------------------------------------------------


def glm4_moe(c: Fields) -> Model:
    spec = attention(
        c, partial=True, bias="qkv" if c["attention_bias"] else False, qk_norm="head" if c["use_qk_norm"] else "none"
    )
    return moe.predicting(c, sparse(c, keyed([spec]), moe.deepseek_experts(c)))


def solar_open(c: Fields) -> Model:
    spec = attention(c, partial=True, bias="qkv" if c["attention_bias"] else False)
    return sparse(c, keyed([spec]), moe.deepseek_experts(c))


def exaone_moe(c: Fields) -> Model:
    """In a model with a window, the layers without one have no positions."""
    c.ignore("sliding_window_pattern", "first_k_dense_replace")  # by which its class has set lists of layers
    alone = attention(c, rotary=c["sliding_window"] is None, qk_norm="head")
    specs = windowed(c, attention(c, qk_norm="head"), alone)
    return sparse(c, keyed(specs), moe.deepseek_experts(c), choice_bias="e_score_correction_bias")


def dots1(c: Fields) -> Model:
    c.ignore("max_window_layers")  # by which its class has set layer_types
    specs = windowed(c, attention(c, bias=c["attention_bias"], qk_norm="head"))
    return sparse(c, keyed(specs), moe.deepseek_experts(c))


# --- Qwen, OLMoE, ERNIE, Granite, MiniMax, Phi ------------------------------------------------------------------------


def qwen2_moe(c: Fields) -> Model:
    c.ignore("max_window_layers", "sliding_window")  # by which its class has set layer_types
    which, mixture = moe.qwen_mixture(c, shared_gate=True)
    layer_types(c, ["full_attention", *["sliding_attention"] * c["use_sliding_window"]])
    spec = attention(c, bias="qkv" if c["qkv_bias"] else False)
    specs = windowed(c, spec) if c["use_sliding_window"] else [spec]
    style = style_of(c, experts=mixture)
    return model_of(
        c, keyed(specs), style, experts=moe.qwen_experts(mixture.count, style) if mixture else {}, which=which
    )


def flex_olmo(c: Fields) -> Model:
    return olmoe(c, "branch")


def olmoe(c: Fields, order: Any = "pre") -> Model:
    c.only("clip_qkv", None)
    names = {"count": "num_experts", "chosen": "num_experts_per_tok", "normalized": "norm_topk_prob"}
    mixture = moe.mixture_of(c, names)
    spec = attention(c, bias=c["attention_bias"], qk_norm="joint")
    style = style_of(c, order=order, experts=mixture)
    return model_of(c, keyed([spec]), style, experts=moe.experts("mlp", mixture.count))


def ernie4_5_moe(c: Fields) -> Model:
    c.only("output_router_logits", False, None)  # whose loss counts the experts that would be chosen without biases
    c.ignore("router_aux_loss_coef")
    if c["moe_norm_min"] is None or not 0 <= c["moe_norm_min"] <= 1e-12:
        c.refuse("moe_norm_min", "at most 1e-12")
    bias, depth, step = c["use_bias"], c["num_hidden_layers"], c.count("moe_layer_interval", 1)
    first, last = (c.count(f"moe_layer_{end}_index") for end in ("start", "end"))
    which = [i for i in range(depth) if (i + 1) % step == 0 and first <= i <= last]
    shared = c.count("moe_num_shared_experts") * c["moe_intermediate_size"]
    names = {"count": "moe_num_experts", "chosen": "moe_k", "width": "moe_intermediate_size"}
    mixture = moe.mixture_of(c, names, balance=0.0, biased=True, normalized=True, shared=shared or None)
    style = style_of(c, bias=bias, head_bias=bias, experts=mixture)
    views = moe.routed("mlp", mixture, style, "moe_statics.e_score_correction_bias")
    views["mlp.choice_bias"] = views["mlp.choice_bias"]._replace(shape=(1, mixture.count))
    return model_of(c, in_pairs(c, [attention(c, bias=bias)]), style, experts=views, which=which)


def granitemoe(c: Fields) -> Model:
    """Its factors of activations become factors of weights."""
    width = c.of_class("shared_intermediate_size") or None
    mixture = moe.mixture_of(c, moe.COUNTED | {"width": "intermediate_size"}, normalized=True, shared=width)
    style = style_of(c, experts=mixture, embedding_scale=multiplier(c, "embedding_multiplier"))
    views = moe.stacked_experts("block_sparse_moe", mixture, c["hidden_size"])
    if width:
        views |= gate_up_views("shared_mlp.input_linear", "shared_mlp.output_linear", width, ours="mlp.shared")
    spec = attention(c, bias=c["attention_bias"], scale=multiplier(c, "attention_multiplier"))
    model = model_of(c, keyed([spec]), style, experts=views)
    return as_granite(c, model, 1 / multiplier(c, "logits_scaling"))


def minimax_m2(c: Fields) -> Model:
    c.only("router_jitter_noise", 0.0)
    c.only("output_router_logits", False)  # whose loss is of a softmax, and the experts' scores are sigmoids
    c.ignore("router_aux_loss_coef", "rotary_dim")  # by the last its class has set partial_rotary_factor
    mixture = moe.mixture_of(c, moe.COUNTED, balance=0.0, scores="sigmoid", biased=True, normalized=True)
    style = style_of(c, experts=mixture)
    views = moe.routed("block_sparse_moe", mixture, style, "e_score_correction_bias", moe.MIXTRAL_EXPERT)
    return model_of(c, keyed([attention(c, partial=True, qk_norm="joint")]), style, experts=views)


def phimoe(c: Fields) -> Model:
    """Experts that SparseMixer chooses, in evaluation."""
    c.only("num_experts_per_tok", 2)
    c.ignore("input_jitter_noise")  # of training
    mixture = moe.mixture_of(c, moe.COUNTED | {"near": "router_jitter_noise"}, NearExperts)
    style = style_of(c, norm="layer-bias", head_bias=c["lm_head_bias"], experts=mixture)
    spec = phimoe_turned(c, bias=c["attention_bias"], pattern=window_of(c, limited=True))
    return model_of(c, keyed([spec]), style, experts=moe.experts("block_sparse_moe", mixture.count, moe.MIXTRAL_EXPERT))


def phimoe_turned(c: Fields, **options: Any) -> AttentionSpec:
    """Returns the spec of attention, with one amplitude of the frequencies. options: its other fields.

    Sequences beyond the original length turn by long_factor, as the model was published; transformers' code turns them
    by short_factor too."""
    given = dict(c["rope_parameters"])
    short, long = (given.pop(f"{name}_mscale", None) for name in ("short", "long"))
    spec = attention(c, parameters=given, **options)
    if spec.rope.kind == "default":
        return spec
    if spec.rope.kind != "longrope" or short != long or not short:
        c.refuse("rope_parameters", "a rope_type of default, or of longrope with short_mscale = long_mscale")
    return replace(spec, rope=replace(spec.rope, amplitude=short))


def hunyuan_v1_moe(c: Fields) -> Model:
    """Attention of Hunyuan; the MLP of all tokens has the width of an expert."""
    c.ignore("sep_token_id", "output_router_logits")  # it has no load-balancing loss
    chosen = c["moe_topk"] if isinstance(c["moe_topk"], list) else [c["moe_topk"]]
    if len({*chosen}) != 1:
        c.refuse("moe_topk", "one number for all layers")
    width = c["intermediate_size"]
    c.meant |= {"experts.chosen=": "moe_topk"}
    mixture = moe.mixture_of(c, {"count": "num_experts"}, balance=0.0, chosen=chosen[0], normalized=True, shared=width)
    style = style_of(c, experts=mixture)
    views = moe.experts("mlp", mixture.count, router="gate.wg") | mlp_views("mlp.shared_mlp", style, "mlp.shared")
    return model_of(c, keyed([hunyuan_spec(c)]), style, LATE, experts=views)


def qwen3_moe(c: Fields) -> Model:
    c.ignore("use_sliding_window")  # by which its class has set sliding_window
    count = "num_experts" if "num_experts" in c.names else "num_local_experts"  # from 5.23 on
    fields = {ours: theirs for ours, theirs in moe.QWEN_EXPERTS.items() if ours != "shared"} | {"count": count}
    which, mixture = moe.qwen_mixture(c, fields)
    spec = attention(c, bias=c["attention_bias"], qk_norm="head", pattern=window_of(c))
    width = c["intermediate_size"]  # also of a model whose layers all have experts
    style, views = style_of(c, experts=mixture), moe.experts("mlp", c[count])
    return model_of(c, keyed([spec]), style, experts=views, which=which, intermediate_size=width)


def mixtral(c: Fields) -> Model:
    c.only("router_jitter_noise", 0.0)
    mixture = moe.mixture_of(c, moe.COUNTED, normalized=True)
    views = moe.experts("block_sparse_moe", mixture.count, moe.MIXTRAL_EXPERT)
    return model_of(c, keyed([attention(c, pattern=window_of(c))]), style_of(c, experts=mixture), experts=views)


# --- parts -----------------------------------------------------------------------------------------------------------


def sparse(
    c: Fields, mixers: Sequence[Mixer], mixture: Experts | None = None, bias: bool = False,
    choice_bias: str = "gate.e_score_correction_bias",
) -> Model:  # fmt: skip
    """Returns a model with Llama's names of modules and the experts of DeepSeek, but in dense layers. bias: of the
    MLPs; choice_bias: as in `routed`."""
    c.ignore("output_router_logits")  # DeepSeek-V3 has no load-balancing loss
    style = style_of(c, bias=bias, experts=mixture)
    views = moe.routed("mlp", mixture, style, choice_bias) if mixture else {}
    return model_of(c, mixers, style, experts=views, which=moe.routed_layers(c) if mixture else ())


FORMATS: dict[str, Format] = {
    "deepseek_v2": Format("DeepseekV2ForCausalLM", deepseek_v2),
    "deepseek_v3": Format("DeepseekV3ForCausalLM", deepseek_v3),
    "glm4_moe_lite": Format("Glm4MoeLiteForCausalLM", deepseek_v3),
    "glm4_moe": Format("Glm4MoeForCausalLM", glm4_moe),
    "dots1": Format("Dots1ForCausalLM", dots1),
    "qwen3_moe": Format("Qwen3MoeForCausalLM", qwen3_moe),
    "mixtral": Format("MixtralForCausalLM", mixtral),
    "qwen2_moe": Format("Qwen2MoeForCausalLM", qwen2_moe),
    "olmoe": Format("OlmoeForCausalLM", olmoe),
    "ernie4_5_moe": Format("Ernie4_5_MoeForCausalLM", ernie4_5_moe, outside=("model.mtp_",)),
    "granitemoe": Format("GraniteMoeForCausalLM", granitemoe),
    "granitemoeshared": Format("GraniteMoeSharedForCausalLM", granitemoe),
    "minimax_m2": Format("MiniMaxM2ForCausalLM", minimax_m2),
    "hunyuan_v1_moe": Format("HunYuanMoEV1ForCausalLM", hunyuan_v1_moe),
    "phimoe": Format("PhimoeForCausalLM", phimoe),
    "flex_olmo": Format("FlexOlmoForCausalLM", flex_olmo),
    "exaone_moe": Format("ExaoneMoeForCausalLM", exaone_moe, outside=("mtp.",)),
    "youtu": Format("YoutuForCausalLM", youtu),
    "solar_open": Format("SolarOpenForCausalLM", solar_open),
}
