"""The formats of transformers' hybrids of Mamba-2 and softmax attention."""

from math import inf
from typing import Any

from ..spec.stack import BlockStyle, Experts, Layer
from . import moe
from .fields import Fields
from .form import Format, Model, model_of, shared
from .mamba import SILU, Mamba2, divisor, mamba_layer
from .parts import as_granite, layer_types, multiplier, scaled
from .softmax import UNGATED, activation, attention, attention_views, style_of
from .views import (
    BACKBONE,
    FINAL_NORM,
    HYBRID,
    PRE_FF_NORMS,
    View,
    Views,
    below,
    gate_up_views,
    layer_name,
    mlp_views,
    modules,
    named,
    outer_views,
)

# --- Falcon-H1 -------------------------------------------------------------------------------------------------------


def falcon_h1(c: Fields) -> Model:
    D, H = c["hidden_size"], c["num_attention_heads"]
    c.only("hidden_act", *SILU)  # of MLPs and convolutions
    c.ignore("num_logits_to_keep")
    order = "norm-gate" if c["mamba_norm_before_gate"] else "gate-norm"
    biases = c["mamba_proj_bias"], c["projectors_bias"]
    mamba = mamba_layer(c, biases, order if c["mamba_rms_norm"] else "none")
    spec = attention(c, bias=c["attention_bias"])
    style = BlockStyle(bias=c["mlp_bias"], embedding_scale=multiplier(c, "embedding_multiplier"))
    own, mlp, factors = mamba.views("mamba"), mlp_views("feed_forward", style), falcon_factors(c)
    own |= {name.replace("mixer", "parallel", 1): view for name, view in attention_views(spec, "self_attn").items()}
    mixer = Layer(mamba.spec(D, H), parallel=spec), scaled(own, factors)
    model = model_of(c, [mixer], style, PRE_FF_NORMS, scaled(mlp, factors), names=HYBRID)
    return model._replace(views=scaled(model.views, {FINAL_NORM: multiplier(c, "lm_head_multiplier")}))


def falcon_factors(c: Fields) -> dict[str, float]:
    """The multipliers of activations in a layer, as factors of the weights before and, of inputs, after them."""
    entering, attending = multiplier(c, "ssm_in_multiplier"), multiplier(c, "attention_in_multiplier")
    factors = {f"parallel.{name}_proj.weight": attending for name in "qkv"}
    for part, value in zip(("gate", "v", "k", "q", "decay"), listed(c, "ssm_multipliers", 5), strict=True):
        factor = multiplier(c, "ssm_multipliers", value)
        factors |= {f"mixer.in_proj.{part}": factor * entering, f"mixer.in_proj.bias.{part}": factor}
    for name, value in zip(("gate", "down"), listed(c, "mlp_multipliers", 2), strict=True):
        factors[f"mlp.{name}_proj.*"] = multiplier(c, "mlp_multipliers", value)
    outputs = {"mixer.o_proj.*": "ssm_out", "parallel.o_proj.*": "attention_out", "parallel.k_proj.*": "key"}
    return factors | {name: multiplier(c, f"{theirs}_multiplier") for name, theirs in outputs.items()}


def listed(c: Fields, name: str, count: int) -> list[Any]:
    if len(c[name] or ()) != count:
        c.refuse(name, f"{count} numbers")
    return c[name]


# --- Granite 4 -------------------------------------------------------------------------------------------------------


def granitemoehybrid(c: Fields) -> Model:
    D, H, rotary = c["hidden_size"], c["num_attention_heads"], c["position_embedding_type"] == "rope"
    c.only("hidden_act", *SILU)  # of MLPs and convolutions
    c.ignore("rope_parameters")
    mamba = mamba_layer(c, (c["mamba_proj_bias"], c["mamba_proj_bias"]))
    scale = multiplier(c, "attention_multiplier")
    spec = attention(c, bias=c["attention_bias"], rotary=rotary, scale=scale)
    mixers = {
        "linear_attention": (mamba.spec(D, H), mamba.views("mamba")),
        "full_attention": (spec, attention_views(spec, "self_attn")),
    }
    listed, mixture = layer_types(c, mixers), granite_experts(c)
    style = BlockStyle(experts=mixture, embedding_scale=multiplier(c, "embedding_multiplier"))
    width = c["shared_intermediate_size"]
    mlp = gate_up_views(
        "shared_mlp.input_linear", "shared_mlp.output_linear", width, ours="mlp.shared" if mixture else "mlp"
    )
    mlp |= moe.stacked_experts("block_sparse_moe", mixture, D) if mixture else {}
    model = model_of(c, [mixers[kind] for kind in listed], style, dense=mlp, experts=mlp, intermediate_size=width)
    return as_granite(c, model, 1 / multiplier(c, "logits_scaling"))


def granite_experts(c: Fields) -> Experts | None:
    if not c["num_local_experts"]:
        c.ignore("num_experts_per_tok", "intermediate_size", "router_aux_loss_coef", "output_router_logits")
        return None
    widths = {"width": "intermediate_size", "shared": "shared_intermediate_size"}
    return moe.mixture_of(c, moe.COUNTED | widths, normalized=True)


# --- Nemotron-H ------------------------------------------------------------------------------------------------------


def nemotron_h(c: Fields) -> Model:
    """Their layers have one branch each. A mixer and the MLP after it are one layer of ours."""
    D, H, heads, bias = c["hidden_size"], c["num_attention_heads"], c["mamba_num_heads"], c["use_bias"]
    c.only("mamba_hidden_act", *SILU)
    c.ignore(*NEMOTRON_UNUSED)
    mamba = Mamba2(
        heads, c["ssm_state_size"], c["mamba_head_dim"], divisor(c, "n_groups", heads), c.count("conv_kernel", 2),
        c["use_conv_bias"], (bias, bias), (max(c["time_step_min"], 0.0), inf),
    )  # fmt: skip
    spec, mlp = attention(c, rotary=False), activation(c, "mlp_hidden_act", UNGATED)
    kinds = {"linear_attention": mamba.spec(D, H), "full_attention": spec}
    listed = layer_types(c, [*kinds, "mlp", "moe"], "layers_block_type")
    mixture = None
    if "moe" in listed:
        mixture = moe.mixture_of(c, NEMOTRON_EXPERTS, balance=0.0, scores="sigmoid", biased=True)
    c.ignore(*NEMOTRON_EXPERTS.values())
    style = BlockStyle(mlp=mlp, bias=c["mlp_bias"], experts=mixture)
    own = {"linear_attention": mamba.views("mixer"), "full_attention": attention_views(spec, "mixer")}
    own |= {"mlp": mlp_views("mixer", style), "moe": nemotron_moe("mixer", mixture, style) if mixture else {}}
    layers: list[Layer] = []
    views = outer_views(c, style, BACKBONE)
    for i, kind in enumerate(listed):
        if kind in kinds:
            layers.append(Layer(kinds[kind], "none"))
        elif not layers or layers[-1].mlp != "none":
            c.refuse("layers_block_type", "an MLP after a mixer alone")
        else:
            layers[-1] = Layer(layers[-1].mixer, "one" if kind == "mlp" else "experts")
        all_own = own[kind] | modules({"mixer_norm" if kind in kinds else "mlp_norm": "norm"})
        theirs = {name: view._replace(name=f"backbone.layers.{i}.{view.name}") for name, view in all_own.items()}
        views |= below(layer_name(len(layers) - 1), theirs)
    sizes = {"num_heads": H, "intermediate_size": c["intermediate_size"], "num_hidden_layers": len(layers)}
    return Model(shared(c, layers, style, **sizes), views)


# Fields that the model does not use, such as the number of layers, and those of layers that are left out.
NEMOTRON_UNUSED = (
    "time_step_max", "time_step_floor", "time_step_limit", "num_logits_to_keep", "use_mamba_kernels", "chunk_size",
    "mamba_ssm_cache_dtype", "expand", "mamba_proj_bias", "attention_bias", "sliding_window", "hidden_dropout",
    "residual_in_fp32", "rescale_prenorm_residual", "output_router_logits", "moe_shared_expert_overlap",
    "n_shared_experts", "num_hidden_layers",
    "num_nextn_predict_layers", "mtp_layers_block_type",
)  # fmt: skip
# Fields of Experts -> fields of the mixture of experts.
NEMOTRON_EXPERTS = {
    "count": "n_routed_experts", "chosen": "num_experts_per_tok", "groups": "n_group", "chosen_groups": "topk_group",
    "normalized": "norm_topk_prob", "scale": "routed_scaling_factor", "width": "moe_intermediate_size",
    "shared": "moe_shared_expert_intermediate_size", "latent": "moe_latent_size",
}  # fmt: skip


def nemotron_moe(theirs: str, mixture: Any, style: BlockStyle) -> Views:
    names = {"choice_bias": "gate.e_score_correction_bias"}
    for ours, module in (("inner", "fc1_latent_proj"), ("outer", "fc2_latent_proj")) if mixture.latent else ():
        names |= {f"{ours}.{kind}": f"{module}.{kind}" for kind in ("weight", "bias")[: 1 + style.bias]}
    views = moe.experts(theirs, mixture.count, {"up": "up_proj", "down": "down_proj"})
    return views | named("mlp", theirs, names) | mlp_views(f"{theirs}.shared_experts", style, "mlp.shared")


# --- Zamba2 ----------------------------------------------------------------------------------------------------------


def zamba2(c: Fields) -> Model:
    D, H, heads, bias = c["hidden_size"], c["num_attention_heads"], c["n_mamba_heads"], c["add_bias_linear"]
    c.ignore(*ZAMBA_UNUSED)
    wide = int(c["mamba_expand"] * D)
    if wide % heads:
        c.refuse("n_mamba_heads", f"a divisor of mamba_expand · hidden_size = {wide}")
    derived = {
        "attention_hidden_size": 2 * D, "attention_head_dim": 2 * D // H, "mamba_headdim": wide // heads,
    }  # fmt: skip
    for name, value in derived.items():
        c.only(name, value)
    mamba = Mamba2(
        heads, c["mamba_d_state"], wide // heads, divisor(c, "mamba_ngroups", heads), c.count("mamba_d_conv", 2),
        True, (bias, bias), (max(c["time_step_min"], 0.0), inf), eps=1e-5,
    )  # fmt: skip
    hybrid = [kind == "hybrid" for kind in layer_types(c, ("linear_attention", "hybrid"), "layers_block_type")]
    c.only("hybrid_layer_ids", [i for i, shares in enumerate(hybrid) if shares])
    if not c["tie_word_embeddings"] and sum(hybrid) > c["num_mem_blocks"]:
        c.refuse("tie_word_embeddings", "True, without which transformers gives each layer a block of its own")
    layers = [Layer(mamba.spec(D, H), "none", shared=shares) for shares in hybrid]
    style = zamba2_style(c, any(hybrid))
    views = outer_views(c, style, HYBRID)
    for i, shares in enumerate(hybrid):
        theirs = f"model.layers.{i}.mamba_decoder" if shares else f"model.layers.{i}"
        views |= modules({f"{layer_name(i)}.mixer_norm": f"{theirs}.input_layernorm"})
        views |= below(layer_name(i), mamba.views(f"{theirs}.mamba"))
    users = [i for i, shares in enumerate(hybrid) if shares]
    views |= zamba2_shared(style, c["intermediate_size"], users)
    sizes = {"num_heads": H, "intermediate_size": c["intermediate_size"]}
    first = [f"model.layers.{i}.shared_transformer." for i in users]
    count = style.shared_count
    copies = tuple((name, first[use % count]) for use, name in enumerate(first) if use >= count)
    return Model(shared(c, layers, style, **sizes), views, copies=copies)


# Fields that the model does not use, or by which their class has set others.
ZAMBA_UNUSED = (
    "time_step_max", "time_step_floor", "num_logits_to_keep", "use_mamba_kernels", "chunk_size", "use_mem_eff_path",
    "use_conv_bias", "use_long_context",
)  # fmt: skip


def zamba2_style(c: Fields, hybrid: bool) -> BlockStyle:
    c.ignore("rope_parameters")
    spec = attention(c, rotary=c["use_mem_rope"], scale="half-key")
    blocks = {
        "shared": spec, "shared_count": c["num_mem_blocks"], "shared_mlp_rank": c["adapter_rank"],
        "shared_attention_rank": c["adapter_rank"] if c["use_shared_attention_adapter"] else None,
    }  # fmt: skip
    return style_of(c, bias=c["add_bias_linear"], **(blocks if hybrid else {}))


def zamba2_shared(style: BlockStyle, width: int, layers: list[int]) -> Views:
    """Returns the views of the shared blocks, each stored in the first layer that uses it, and of what the layers have
    for them. layers: indices of the layers that use them."""
    views: Views = {}
    blocks = min(len(layers), style.shared_count)
    for use, layer in enumerate(layers):
        theirs, b = f"model.layers.{layers[use % blocks]}.shared_transformer", use % blocks
        views[f"{layer_name(layer)}.link.weight"] = View(f"model.layers.{layer}.linear.weight")
        adapted = {"mlp": "feed_forward.gate_up_proj_adapter_list"}
        if style.shared_attention_rank is not None:
            adapted |= {f"attention.{n}_proj": f"self_attn.linear_{n}_adapter_list" for n in "qkv"}
        pairs = {f"{ours}.{j}.weight": f"{name}.{use}.{j}.weight" for ours, name in adapted.items() for j in (0, 1)}
        views |= named(f"{layer_name(layer)}.adapters", theirs, pairs)
        if use < blocks:
            ours = "model.backbone.shared" + (f".{b}" if blocks > 1 else "")
            names = PRE_FF_NORMS | {f"mixer.{n}_proj": f"self_attn.{n}_proj" for n in "qkvo"}
            views |= modules({f"{ours}.{name}": f"{theirs}.{module}" for name, module in names.items()})
            up, down = (f"{theirs}.feed_forward.{name}_proj" for name in ("gate_up", "down"))
            views |= below(ours, gate_up_views(up, down, width, style.bias))
    return views


FORMATS: dict[str, Format] = {
    "falcon_h1": Format("FalconH1ForCausalLM", falcon_h1),
    "granitemoehybrid": Format("GraniteMoeHybridForCausalLM", granitemoehybrid),
    "nemotron_h": Format("NemotronHForCausalLM", nemotron_h, outside=("mtp.",)),
    "zamba2": Format("Zamba2ForCausalLM", zamba2),
}
