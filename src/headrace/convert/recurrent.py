"""The formats of transformers' models of scans and of linear mixers without a delta rule, alone or with attention."""

import math
from typing import Any

import torch

from ..extra.specs.scan import ScanSpec
from ..spec.attention import Pattern
from ..spec.decay import Decay
from ..spec.linear import Heads, Inputs, MixerSpec, Read
from ..spec.stack import BlockStyle, Layer
from . import moe
from .fields import Fields
from .form import Format, Mixer, Model, model_of, shared
from .mamba import SILU, Mamba2, divisor, limit, mamba1, mamba_layer, mixers_alone
from .parts import layer_types, scaled
from .softmax import attention, attention_views, window_of
from .views import (
    HYBRID,
    PRE_FF_NORMS,
    View,
    Views,
    assembled,
    below,
    layer_name,
    mlp_views,
    modules,
    named,
    outer_views,
    plain,
    stacked,
)


def mamba2(c: Fields) -> Model:
    H, D, V = c["num_heads"], c["hidden_size"], c["head_dim"]
    if c["expand"] * D != V * H:
        c.refuse("head_dim", f"expand · hidden_size / num_heads = {c['expand'] * D / H:g}")
    c.only("hidden_act", *SILU)
    c.only("rescale_prenorm_residual", False)  # transformers rescales again whenever it loads
    c.ignore("time_step_rank", "time_step_min", "time_step_max", "time_step_floor")  # of initial values alone
    c.ignore("chunk_size", "residual_in_fp32")
    if "dt_limit" in c.names:  # as flash-linear-attention writes it under the same model_type
        c.only("dt_limit", [0.0, math.inf])
        c.only("norm_before_gate", False)  # which has no effect in transformers
    c.only("norm_eps", c["layer_norm_epsilon"])  # likewise
    layer = Mamba2(
        H, c["state_size"], V, divisor(c, "n_groups", H), c.count("conv_kernel", 2), c["use_conv_bias"],
        (c["use_bias"],) * 2, limit(c, "time_step_limit"),
    )  # fmt: skip
    return mixers_alone(c, layer.spec(D, H), layer.views("mixer"), num_heads=H)


def mamba(c: Fields, **norm: Any) -> Model:
    """norm: the fields of a ScanSpec about the norms of the step size, B and C."""
    D, bias, conv_bias = c["hidden_size"], c["use_bias"], c["use_conv_bias"]
    c.only("hidden_act", *SILU)
    c.only("rescale_prenorm_residual", False)  # transformers rescales again whenever it loads
    c.ignore("expand", "residual_in_fp32", "use_mambapy", "use_associative_scan")  # expand: of intermediate_size
    c.ignore("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor")
    c.only("norm_eps", c["layer_norm_epsilon"])  # as flash-linear-attention writes it under the same model_type
    spec = ScanSpec(
        "mamba", c["state_size"], c.count("conv_kernel", 2), c.count("intermediate_size", 1) / D, c["time_step_rank"],
        conv_bias=conv_bias, bias=bias, **norm,
    )  # fmt: skip
    return mixers_alone(c, spec, mamba1("mixer", bias, conv_bias))


def falcon_mamba(c: Fields) -> Model:
    return mamba(c, norm="plain", eps=c["mixer_rms_eps"])


# --- with softmax attention ------------------------------------------------------------------------------------------


def bamba(c: Fields) -> Model:
    c.only("hidden_act", *SILU)
    c.ignore("num_logits_to_keep", "z_loss_coefficient")
    mamba = mamba_layer(c, (c["mamba_proj_bias"],) * 2)
    softmax = attention(c, partial=True, bias=c["attention_bias"])
    spec = mamba.spec(c["hidden_size"], c["num_attention_heads"])
    attends = [i in (c["attn_layer_indices"] or []) for i in range(c["num_hidden_layers"])]
    style = BlockStyle(bias=c["mlp_bias"])
    own = {True: (softmax, attention_views(softmax, "self_attn")), False: (spec, mamba.views("mamba"))}
    mixers = [own[each] for each in attends]
    return model_of(c, mixers, style, PRE_FF_NORMS, mlp_views("feed_forward", style), names=HYBRID)


def jamba(c: Fields) -> Model:
    c.only("hidden_act", *SILU)
    c.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    bias, conv_bias, names = c["mamba_proj_bias"], c["mamba_conv_bias"], moe.COUNTED | {"count": "num_experts"}
    spec = ScanSpec(
        "mamba", c["mamba_d_state"], c.count("mamba_d_conv", 2), c["mamba_expand"], c["mamba_dt_rank"], True,
        conv_bias, bias,
    )  # fmt: skip
    softmax = attention(c, rotary=False)
    attends, mixes = (
        [i % c.count(f"{kind}_layer_period", 1) == c[f"{kind}_layer_offset"] for i in range(c["num_hidden_layers"])]
        for kind in ("attn", "expert")
    )
    which = [i for i, mixed in enumerate(mixes) if mixed and c["num_experts"] > 1]
    norms = {f"mixer.norm_weight.{part}": f"mamba.{part.lower()}_layernorm.weight" for part in ("dt", "B", "C")}
    own: dict[bool, Mixer] = {
        True: (softmax, attention_views(softmax, "self_attn")),
        False: (spec, mamba1("mamba", bias, conv_bias) | plain(norms)),
    }
    style = BlockStyle(experts=moe.mixture_of(c, names) if which else None)
    c.ignore("num_experts_per_tok", "router_aux_loss_coef", "output_router_logits")  # of a model without experts
    return model_of(
        c, [own[each] for each in attends], style, PRE_FF_NORMS, mlp_views("feed_forward", style),
        experts=moe.experts("feed_forward", c["num_experts"], router="router"), which=which, names=HYBRID,
    )  # fmt: skip


def minimax(c: Fields) -> Model:
    """Blocks y = norm(α x + β f(x)): α is in the norm of x, and divides what f reads."""
    c.only("hidden_act", *SILU)
    c.only("router_jitter_noise", 0.0)
    c.ignore("block_size")
    kinds = layer_types(c, ("linear_attention", "full_attention"))
    H, mixture = c["num_attention_heads"], moe.mixture_of(c, moe.COUNTED, normalized=True)
    alphas, betas = (
        {kind: factor(c, f"{name}_{which}_factor") for kind, name in FACTORS.items()} for which in ("alpha", "beta")
    )
    softmax, width = attention(c, pattern=window_of(c)), H * (c["head_dim"] or c["hidden_size"] // H)
    own = {
        "linear_attention": lightning_views("self_attn", width, H),
        "full_attention": attention_views(softmax, "self_attn"),
    }
    views = moe.experts("block_sparse_moe", mixture.count, moe.MIXTRAL_EXPERT)
    sparse = scaled(views, folded(alphas["mlp"], betas["mlp"]))
    sparse["mixer_norm.weight"] = View("post_attention_layernorm.weight", factor=alphas["mlp"])
    layers = [scaled(own[kind], folded(alphas[kind], betas[kind])) | sparse for kind in kinds]
    style = BlockStyle(order="post", embedding_norm=True, experts=mixture)
    views = assembled(layers, outer_views(c, style))
    # The norm before a block is that after the one before it.
    places = ["model.backbone.embedding_norm", *(f"{layer_name(i)}.mlp_norm" for i in range(len(kinds)))]
    views |= {
        f"{place}.weight": View(f"model.layers.{i}.input_layernorm.weight", factor=alphas[kind])
        for i, (place, kind) in enumerate(zip(places, kinds, strict=False))
    }
    views[f"{places[-1]}.weight"] = views.pop("model.backbone.norm.weight")
    sizes = {"num_heads": H, "intermediate_size": c["intermediate_size"]}
    mixers = [softmax if kind == "full_attention" else lightning(c, i, width) for i, kind in enumerate(kinds)]
    return Model(shared(c, [Layer(mixer, "experts") for mixer in mixers], style, **sizes), views)


FACTORS = {"linear_attention": "linear_attn", "full_attention": "full_attn", "mlp": "mlp"}


def factor(c: Fields, name: str) -> float:
    """Returns a factor, by which the conversion to their format divides."""
    if c[name] == 0:
        c.refuse(name, "another number than 0")
    return c[name]


def folded(reads: float, writes: float) -> dict[str, float]:
    """Returns the factors of the weights of a branch: its input is divided by `reads`, its output times `writes`."""
    inner = ("*_proj.weight", "mixer.in_proj.*", "*.router.weight", "mlp.*.gate", "mlp.*.up")
    return dict.fromkeys(inner, 1 / reads) | {"mixer.o_proj.weight": reads * writes, "mlp.*.down": writes}


def lightning(c: Fields, i: int, width: int) -> MixerSpec:
    """Returns the spec of Lightning Attention in layer i. width: of all heads together."""
    share = width / c["hidden_size"]
    rate = 1 - i / (c["num_hidden_layers"] - 1 + 1e-5) + 1e-5
    inputs, read = Inputs(feature_map="silu", value_map="silu"), Read("rms-joint", "sigmoid", scale="one", eps=1e-6)
    return MixerSpec(Heads(share, share), inputs, Decay("slopes", rate=rate), read=read)


def lightning_views(theirs: str, width: int, heads: int) -> Views:
    """Returns the views of Lightning Attention: qkv_proj stacks q, k and v of a head."""
    own = {"in_proj.gate": "output_gate.weight", "norm_weight": "norm.weight", "o_proj.weight": "out_proj.weight"}
    parts = stacked(f"{theirs}.qkv_proj.weight", dict.fromkeys("qkv", width), heads)
    return below("mixer.in_proj", parts) | named("mixer", theirs, own)


def recurrent_gemma(c: Fields) -> Model:
    c.only("hidden_activation", "gelu_pytorch_tanh")
    c.ignore("w_init_variance_scale", "final_w_init_variance_scale")
    if not c["block_types"] or {*c["block_types"]} - {"recurrent", "attention"}:
        c.refuse("block_types", "a list of recurrent and attention")
    unit = ScanSpec("rg-lru", conv=c.count("conv1d_width", 2), expand=c["lru_width"] / c["hidden_size"], bias=True)
    pattern, bias = Pattern(window=c["attention_window_size"]), True if c["attention_bias"] else "o"
    softmax = attention(c, partial=True, pattern=pattern, bias=bias)
    own: dict[str, Mixer] = {
        "recurrent": (unit, rg_lru_views("temporal_block")),
        "attention": (softmax, attention_views(softmax, "temporal_block")),
    }
    kinds = [c["block_types"][i % len(c["block_types"])] for i in range(c["num_hidden_layers"])]
    scale = float(torch.tensor(c["hidden_size"] ** 0.5, dtype=torch.bfloat16))  # it is rounded there
    style = BlockStyle(
        "rms-offset", mlp="geglu-tanh", bias=True, embedding_scale=scale, logits_cap=c["logits_soft_cap"]
    )
    norms, width = {"mixer_norm": "temporal_pre_norm", "mlp_norm": "channel_pre_norm"}, c["intermediate_size"] // 2
    mixers, names = [own[kind] for kind in kinds], ("model", "embed_tokens", "final_norm", "layers")
    return model_of(c, mixers, style, norms, mlp_views("mlp_block", style), names=names, intermediate_size=width)


def rg_lru_views(theirs: str) -> Views:
    names = {
        "in_proj.u": "linear_x.weight", "in_proj.bias.u": "linear_x.bias", "in_proj.branch": "linear_y.weight",
        "in_proj.bias.branch": "linear_y.bias", "rate": "rg_lru.recurrent_param",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        names |= {f"gate_{kind}.i": f"rg_lru.input_gate_{kind}", f"gate_{kind}.r": f"rg_lru.recurrent_gate_{kind}"}
    both = modules({"mixer.conv": f"{theirs}.conv_1d", "mixer.out_proj": f"{theirs}.linear_out"}, True)
    return named("mixer", theirs, names) | both


FORMATS: dict[str, Format] = {
    "mamba2": Format("Mamba2ForCausalLM", mamba2),
    "mamba": Format("MambaForCausalLM", mamba),
    "falcon_mamba": Format("FalconMambaForCausalLM", falcon_mamba),
    "bamba": Format("BambaForCausalLM", bamba),
    "jamba": Format("JambaForCausalLM", jamba),
    "minimax": Format("MiniMaxForCausalLM", minimax, buffers=("_decay", "slope_rate")),
    "recurrent_gemma": Format("RecurrentGemmaForCausalLM", recurrent_gemma),
}
