"""The formats of transformers' hybrids of delta rules and softmax attention."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from .. import zoo
from ..extra.specs.latent import LatentSpec
from ..spec.attention import AttentionSpec, Rope
from ..spec.linear import MixerSpec
from ..spec.stack import BlockStyle, Layer
from . import moe
from .fields import Fields
from .flash import DELTA_RULE, GATE, RATE, STEP
from .form import Format, Mixer, Model, model_of
from .parts import latent_attention, layer_types
from .rotary import latent_scale, rotation
from .softmax import attention, attention_views, keyed, window_of
from .views import LLAMA, View, Views, below, mlp_views, modules, named, plain, projections, stacked

KINDS = ("linear_attention", "full_attention")
DYNAMICS = {
    "decay.A_log": "A_log", "decay.dt_bias": "dt_bias", "norm_weight": "norm.weight",
    "o_proj.weight": "out_proj.weight",
}  # fmt: skip


# --- Qwen3-Next and Qwen3.5 ------------------------------------------------------------------------------------------


def qwen3_next(c: Fields) -> Model:
    return qwen(c, qwen3_next_projections, *moe.qwen_mixture(c, shared_gate=True))


def qwen3_5(c: Fields) -> Model:
    return qwen(c, qwen3_5_projections)


def qwen3_5_moe(c: Fields) -> Model:
    """Every layer has experts, whose weights are always divided by their sum."""
    fields = {ours: theirs for ours, theirs in moe.QWEN_EXPERTS.items() if ours != "normalized"}
    mixture = moe.mixture_of(c, fields, normalized=True, shared_gate=True)
    return qwen(c, qwen3_5_projections, range(c["num_hidden_layers"]), mixture)


def qwen(
    c: Fields, projections: Callable[[dict[str, int], int], Views], sparse: Collection[int] = (), mixture: Any = None
) -> Model:
    """projections: views of the input projections of a linear layer, by their rows and the number of heads of q and k;
    sparse: the layers with experts."""
    c.ignore("full_attention_interval")  # by which their class has set layer_types
    c.only("hidden_act", "silu", "swish")
    kinds, (linear, rows), mixers = layer_types(c, KINDS), gated_delta(c), dict[str, Mixer]()
    own = delta_views(projections(rows, c["linear_num_key_heads"]), rows)
    style, heads = BlockStyle("rms-offset", experts=mixture), c["linear_num_value_heads"]
    if "full_attention" in kinds:
        spec, heads = qwen_attention(c), c["num_attention_heads"]
        mixers["full_attention"] = spec, qwen_attention_views("self_attn", spec)
    else:
        linear = zoo.change_all(linear, {"heads.count": None})
        c.ignore("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "rope_parameters")
    mixers["linear_attention"] = linear, own
    views = moe.qwen_experts(mixture.count, style) if mixture else {}
    return model_of(c, [mixers[kind] for kind in kinds], style, experts=views, which=sparse, num_heads=heads)


def qwen_attention(c: Fields) -> AttentionSpec:
    """Softmax attention with a sigmoid gate per channel, and norms of q and k."""
    d = c["head_dim"]
    return AttentionSpec(
        kv_heads=c["num_key_value_heads"], count=c["num_attention_heads"], head_dim=d,
        rope=rotation(c, d, partial=True), bias=c["attention_bias"], qk_norm="head-offset", gate="channel",
    )  # fmt: skip


def qwen_attention_views(theirs: str, spec: Any) -> Views:
    """q_proj stacks, per head, q and the logits of the gate."""
    width = spec.count * spec.head_dim
    both = projections("mixer", f"{theirs}.q_proj", {"q": width, "g": width}, spec.count, spec.bias)
    return attention_views(spec, theirs) | both


Rows = dict[str, int]  # of each part of the input projections of a layer


def gated_delta(c: Fields, changes: Any = None) -> tuple[MixerSpec, Rows]:
    """Returns the spec of Gated DeltaNet, and its rows. changes: {path of a field of the spec: value}."""
    names, D = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim"), c["hidden_size"]
    H, groups, K, V = (c[f"linear_{name}"] for name in names)
    spec = zoo.change_all(zoo.LINEAR["gated-deltanet"], {
        "heads.expand_k": K * H / D, "heads.expand_v": V * H / D, "heads.count": H,
        "heads.qk_groups": None if groups == H else groups, "inputs.conv": c.count("linear_conv_kernel_dim", 2),
    } | (changes or {}))  # fmt: skip
    return spec, {"q": groups * K, "k": groups * K, "v": H * V, "gate": H * V, "beta": H, "decay": H}


def delta_views(projected: Views, rows: Rows) -> Views:
    """Returns the views of a layer. projected: of its input projections."""
    conv = stacked("linear_attn.conv1d.weight", {part: rows[part] for part in "qkv"})
    projected = below("mixer.in_proj", projected) | below("mixer.conv.weight", conv)
    return projected | named("mixer", "linear_attn", DYNAMICS)


def qwen3_next_projections(rows: Rows, groups: int) -> Views:
    """Projections are grouped by key head: q and k of the head, then v and gate of the value heads that share it."""
    views = stacked("linear_attn.in_proj_qkvz.weight", {part: rows[part] for part in ("q", "k", "v", "gate")}, groups)
    return views | stacked("linear_attn.in_proj_ba.weight", {part: rows[part] for part in ("beta", "decay")}, groups)


def qwen3_5_projections(rows: Rows, groups: int) -> Views:
    parts = {"gate": "z", "beta": "b", "decay": "a"}
    views = plain({ours: f"linear_attn.in_proj_{theirs}.weight" for ours, theirs in parts.items()})
    return views | stacked("linear_attn.in_proj_qkv.weight", {part: rows[part] for part in "qkv"})


# --- Lara Mini -------------------------------------------------------------------------------------------------------


def lara_mini(c: Fields) -> Model:
    """Gated DeltaNet with one input projection, and softmax attention that rotates in its windows alone. Every layer
    has experts."""
    c.only("hidden_act", "silu", "swish")
    kinds = layer_types(c, (*KINDS, "sliding_attention"))
    (linear, rows), mixture = gated_delta(c), moe.mixture_of(c, moe.QWEN_EXPERTS)
    softmax = attention(c, bias=c["attention_bias"], qk_norm="head", rotary=False)
    turned = replace(softmax, rotary=True, rope=rotation(c, c["head_dim"]), pattern=window_of(c))
    mixers = dict(zip(("full_attention", "sliding_attention"), keyed([softmax, turned]), strict=True))
    own = delta_views(stacked("linear_attn.in_proj.weight", rows), rows)
    mixers["linear_attention"] = linear, own | plain({"mixer.norm_weight": "linear_attn.out_norm.weight"})
    style = BlockStyle(experts=mixture)
    views = moe.stacked_experts("mlp", mixture, c["hidden_size"], LARA_EXPERTS)
    views |= mlp_views("mlp.shared_expert", style, "mlp.shared")
    return model_of(c, [mixers[kind] for kind in kinds], style, experts=views)


LARA_EXPERTS = "gate.weight", "experts.gate_up_proj", "experts.down_proj"


# --- OLMo Hybrid -----------------------------------------------------------------------------------------------------

OLMO_NORMS = {"mixer_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}
OLMO_BRANCH_NORMS = {"mixer_norm": "feedforward_layer_norm", "mlp_norm": "post_feedforward_layernorm"}


def olmo_hybrid(c: Fields) -> Model:
    """Layers of Gated DeltaNet with norms of the branches' inputs, and of softmax attention with norms of their
    outputs."""
    c.only("hidden_act", "silu", "swish")
    c.only("attention_bias", False)
    c.ignore(*(name for name in c.names if name.startswith(("linear_a_log_", "linear_dt_"))))  # initial values
    H, rope = c["num_attention_heads"], c["rope_parameters"]
    rotated = rope is not None and rope.get("rope_theta") is not None
    turned = rotation(c, c["hidden_size"] // H) if rotated else Rope()
    spec = AttentionSpec(c["num_key_value_heads"], rotated, count=H, qk_norm="joint", rope=turned)
    beta = "sigmoid-2" if c["linear_allow_neg_eigval"] else "sigmoid"
    linear, _ = gated_delta(c, {"write.beta": beta, "read.eps": 1e-5})
    mixers: dict[str, Mixer] = {
        "linear_attention": (linear, modules(OLMO_NORMS) | named("mixer", "linear_attn", DELTA_RULE | GATE | STEP)),
        "full_attention": (
            Layer(spec, order="branch"), modules(OLMO_BRANCH_NORMS) | attention_views(spec, "self_attn")
        ),
    }  # fmt: skip
    return model_of(c, [mixers[kind] for kind in layer_types(c, KINDS)], BlockStyle(), {})


# --- Kimi Linear and Ling --------------------------------------------------------------------------------------------

SEPARATE = DELTA_RULE | GATE | RATE
KIMI_LOW_RANK = {
    "in_proj.decay": "f_a_proj.weight", "decay.up.weight": "f_b_proj.weight", "in_proj.gate": "g_a_proj.weight",
    "gate.up.weight": "g_b_proj.weight",
}  # fmt: skip
LING = {"in_proj.decay": "f_proj.weight", "o_proj.weight": "dense.weight"}


def kimi_linear(c: Fields) -> Model:
    """Kimi Delta Attention, and latent attention without positions."""
    linear = kimi_delta(c, {"read.gate": "sigmoid-low-rank", "read.gate_bias": False})
    own = named("mixer", "self_attn", SEPARATE | KIMI_LOW_RANK)
    own["mixer.decay.A_log"] = View("self_attn.A_log", shape=(1, 1, c["linear_num_heads"], 1))
    latent = latent_spec(c, rotary=False)
    mixers = (linear, own), (latent, latent_attention("self_attn", latent, "o_proj", False))
    c.ignore("linear_attn_config", "head_dim", "first_k_dense_replace")  # by which its class has set others
    return kimi(c, mixers, "block_sparse_moe", "gate.e_score_correction_bias", moe.MIXTRAL_EXPERT)


def bailing_hybrid(c: Fields) -> Model:
    """Kimi Delta Attention with a bounded decay, and latent attention with a gate per head (Ling 3)."""
    bounded = {"decay.lower_bound": c["kda_lower_bound"]} if c["kda_safe_gate"] else {}
    c.ignore("kda_lower_bound", "layer_group_size", "first_k_dense_replace", "mtp_loss_scaling_factor", "head_dim")
    c.ignore("short_conv_kernel_size", "rope_theta")
    linear = kimi_delta(c, {"decay.rank": "full", "read.gate": "sigmoid"} | bounded)
    latent = latent_spec(c, gate="head")
    own = named("mixer", "attention", SEPARATE | LING), latent_attention("attention", latent, "dense", True)
    mixers, names = [*zip((linear, latent), own, strict=True)], ("model", "word_embeddings", "norm", "layers")
    return moe.predicting(c, kimi(c, mixers, "mlp", "gate.expert_bias", moe.GATED_EXPERT, names))


def kimi_delta(c: Fields, changes: dict[str, Any]) -> MixerSpec:
    """Returns the spec of Kimi Delta Attention."""
    D, H, d = c["hidden_size"], c["linear_num_heads"], c["linear_head_dim"]
    sizes = {"heads.expand_k": d * H / D, "heads.expand_v": d * H / D, "heads.count": H, "heads.width": None}
    return zoo.change_all(zoo.LINEAR["kda"], sizes | {"inputs.conv": c.count("linear_conv_kernel_dim", 2)} | changes)


def latent_spec(c: Fields, **options: Any) -> LatentSpec:
    """Returns the spec of multi-head latent attention in the form of DeepSeek-V3."""
    c.only("attention_bias", False)
    c.only("num_key_value_heads", c["num_attention_heads"])
    c.ignore("pretraining_tp")
    if c["qk_rope_head_dim"] < 2 or c["qk_rope_head_dim"] % 2:
        c.refuse("qk_rope_head_dim", "an even number of at least 2")
    if options.get("rotary", True):
        rope = rotation(c, c["qk_rope_head_dim"])
        scale = latent_scale(c, rope, c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        options |= {"rope": rope, "scale": scale}
    return LatentSpec(
        c["kv_lora_rank"], c["q_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"],
        count=c["num_attention_heads"], norm_eps=1e-6, **options,
    )  # fmt: skip


def kimi(
    c: Fields, mixers: Sequence[Mixer], theirs: str, choice_bias: str, expert: dict[str, str],
    names: tuple[str, ...] = LLAMA,
) -> Model:  # fmt: skip
    """mixers: the linear one, and latent attention; theirs, choice_bias, expert: as in `moe.routed`."""
    c.only("hidden_act", "silu", "swish")
    c.ignore("output_router_logits")  # DeepSeek-V3 has no load-balancing loss
    mixture, which = moe.deepseek_experts(c), moe.routed_layers(c)
    style = BlockStyle(experts=mixture if which else None)
    layers = [mixers[KINDS.index(kind)] for kind in layer_types(c, KINDS)]
    dense, views = mlp_views(theirs, style), moe.routed(theirs, mixture, style, choice_bias, expert)
    return model_of(c, layers, style, dense=dense, experts=views, which=which, names=names)


IMAGES: Any = {
    "outside": ("mtp.", "model.visual."), "inner": "text_config", "renamed": ("model.", "model.language_model."),
}  # fmt: skip
FORMATS: dict[str, Format] = {
    "qwen3_next": Format("Qwen3NextForCausalLM", qwen3_next, offset=True, outside=("mtp.",)),
    "qwen3_5_text": Format("Qwen3_5ForCausalLM", qwen3_5, outside=("mtp.",)),
    "qwen3_5": Format("Qwen3_5ForCausalLM", qwen3_5, **IMAGES),
    "qwen3_5_moe_text": Format("Qwen3_5MoeForCausalLM", qwen3_5_moe, outside=("mtp.",)),
    "qwen3_5_moe": Format("Qwen3_5MoeForCausalLM", qwen3_5_moe, **IMAGES),
    "lara_mini": Format("LaraMiniForCausalLM", lara_mini),
    "olmo_hybrid": Format("OlmoHybridForCausalLM", olmo_hybrid),
    # transformers calls the dense MLPs of some layers as it does those of experts when it saves a model
    "kimi_linear": Format("KimiLinearForCausalLM", kimi_linear, renamed=(".block_sparse_moe.", ".mlp.")),
    "bailing_hybrid": Format("BailingHybridForCausalLM", bailing_hybrid, outside=("model.mtp.",)),
}  # fmt: skip
