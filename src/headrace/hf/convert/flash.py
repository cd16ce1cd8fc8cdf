"""The formats of flash-linear-attention's RetNet, GLA, DeltaNet and Gated DeltaNet."""

from functools import partial
from typing import Any

from ...spec.linear import MixerSpec
from .form import COMMON, SWIGLU, Config, Format, conv_size, embedding_views, key_heads, named, require_value

READ = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 2048,
    "hidden_ratio": 4, "intermediate_size": None, "norm_eps": 1e-6, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("swish",), "attn": (None,), "attnres_block_size": (None,)}
# Fields that select an implementation, and two of earlier versions whose other values imply other tensors.
IGNORED = COMMON | {
    "attn_mode", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp", "norm_first",
    "share_conv_kernel",
}  # fmt: skip
PROJECTIONS = {f"mixer.in_proj.{part}": f"attn.{part}_proj.weight" for part in "qkv"}
BLOCK = {"mixer_norm.weight": "attn_norm.weight", "mlp_norm.weight": "mlp_norm.weight", **SWIGLU}
BLOCK |= {"mixer.o_proj.weight": "attn.o_proj.weight"}
GATE = {"mixer.in_proj.gate": "attn.g_proj.weight"}
BETA = {"mixer.in_proj.beta": "attn.b_proj.weight"}
CONVOLUTIONS = {f"mixer.conv.weight.{part}": f"attn.{part}_conv1d.weight" for part in "qkv"}


def fla_config(c: Config, mixer: str) -> Config:
    width = c["intermediate_size"]
    if width is None:
        width = 256 * -(-int(c["hidden_size"] * (c["hidden_ratio"] or 4) * 2 / 3) // 256)
    return {"mixer": mixer, "num_heads": c["num_heads"], "intermediate_size": width}


def fla_describe(config: Any, **more: Any) -> Config:
    sizes = {"num_heads": config.num_heads, "intermediate_size": config.intermediate_size, "norm_eps": config.norm_eps}
    return sizes | more


def widths(c: Config) -> str:
    return f"heads.expand_k={float(c['expand_k'])}, heads.expand_v={float(c['expand_v'])}"


def expanded(config: Any) -> Config:
    heads = config.mixers[0].heads
    return {"expand_k": heads.expand_k, "expand_v": heads.expand_v}


def gated(config: Any) -> bool:
    return config.mixers[0].read.gate != "none"


def ungrouped_config(c: Config, mixer: str) -> Config:
    """The configuration of RetNet or GLA."""
    require_value(c, "num_kv_heads", None, c["num_heads"])
    return fla_config(c, f"{mixer}({widths(c)})")


def deltanet_config(c: Config) -> Config:
    gate = "silu" if c["use_gate"] else "none"
    return fla_config(c, f"deltanet({widths(c)}, inputs.conv={conv_size(c, 'conv_size')}, read.gate={gate})")


def gated_deltanet_config(c: Config) -> Config:
    values = c["num_v_heads"] or c["num_heads"]
    K, V = c["head_dim"], round(c["head_dim"] * c["expand_v"], 6)
    groups = "none" if values == c["num_heads"] else c["num_heads"]
    expand_k, expand_v = (width * values / c["hidden_size"] for width in (K, V))
    mixer = f"heads.expand_k={expand_k}, heads.expand_v={expand_v}, heads.qk_groups={groups}"
    return fla_config(c, f"gated-deltanet({mixer}, inputs.conv={conv_size(c, 'conv_size')})") | {"num_heads": values}


def gated_deltanet_describe(config: Any) -> Config:
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    sizes = {"head_dim": K, "expand_v": V / K, "num_v_heads": H, "conv_size": spec.inputs.conv}
    return fla_describe(config, **sizes) | {"num_heads": key_heads(spec, H)}


def fla(architecture: str, config, describe, pairs, read: Config, only: dict[str, Any], *ignored: str) -> Format:
    """A format. pairs: maps a HeadraceConfig to the names of a layer's tensors that not all layers have."""
    layer = lambda c: named("model.layers.#", BLOCK | PROJECTIONS | pairs(c))  # noqa: E731
    fields = READ | read, ONLY | only, IGNORED | {*ignored}
    return Format(
        architecture, MixerSpec, config, describe, layer, embedding_views("model", "embeddings", "norm"), *fields
    )


FUSED_NORM = {"mixer.norm_weight": "attn.g_norm_swish_gate.weight"}
NORM = {"mixer.norm_weight": "attn.o_norm.weight"}
LOW_RANK_DECAY = {
    "mixer.in_proj.decay": "attn.gk_proj.0.weight",
    "mixer.decay.up.weight": "attn.gk_proj.1.weight",
    "mixer.decay.up.bias": "attn.gk_proj.1.bias",
}
STEP = {
    "mixer.in_proj.decay": "attn.a_proj.weight",
    "mixer.decay.A_log": "attn.A_log",
    "mixer.decay.dt_bias": "attn.dt_bias",
}

# Without fuse_norm the tensor FUSED_NORM has another name.
NORM_AND_GATE = {
    "feature_map": (None,), "use_output_gate": (True,), "elementwise_affine": (True,), "fuse_norm": (True,),
}  # fmt: skip
DELTA = {"use_short_conv": (True,), "allow_neg_eigval": (False,)}

FORMATS: dict[str, Format] = {
    "retnet": fla(
        "RetNetForCausalLM", partial(ungrouped_config, mixer="retnet"), lambda c: fla_describe(c, **expanded(c)),
        lambda c: GATE | FUSED_NORM,
        {"num_heads": 8, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2}, NORM_AND_GATE,
        "use_short_conv", "conv_size",  # not used by any layer of that library
    ),
    "gla": fla(
        "GLAForCausalLM", partial(ungrouped_config, mixer="gla"), lambda c: fla_describe(c, **expanded(c)),
        lambda c: GATE | FUSED_NORM | LOW_RANK_DECAY,
        {"num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.0},
        NORM_AND_GATE | {"use_short_conv": (False,), "clamp_min": (None,), "use_gk": (True,), "use_gv": (False,)},
        "conv_size",
    ),
    "delta_net": fla(
        "DeltaNetForCausalLM", deltanet_config,
        lambda c: fla_describe(c, **expanded(c), conv_size=c.mixers[0].inputs.conv, use_gate=gated(c)),
        lambda c: BETA | CONVOLUTIONS | NORM | (GATE if gated(c) else {}),
        {"num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "conv_size": 4, "use_gate": False},
        DELTA | {"use_beta": (True,), "use_output_norm": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",)},
        "fuse_norm",
    ),
    "gated_deltanet": fla(
        "GatedDeltaNetForCausalLM", gated_deltanet_config, gated_deltanet_describe,
        lambda c: BETA | CONVOLUTIONS | NORM | GATE | STEP,
        {"num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0, "conv_size": 4,
         "num_hidden_layers": 21},
        DELTA | {"use_gate": (True,)},
        "fuse_norm",
    ),
}  # fmt: skip
