"""Fields of the config.json of other libraries for models of headrace, for the export."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..spec.attention import AttentionSpec
from ..spec.linear import MixerSpec
from ..spec.mixer import Spec
from .fields import Config
from .rotary import rope_parameters
from .softmax import GATED


def llama(config: Any) -> Config:
    spec, style = config.mixers[0], config.sizes.style
    return {
        "hidden_act": {kind: name for name, kind in GATED.items()}.get(style.mlp, "silu"),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": spec.kv_heads or config.num_heads,
        "head_dim": spec.head_dims(config.hidden_size, config.num_heads)[0],
        "attention_bias": spec.bias is True,
        "mlp_bias": style.bias,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters(spec.rope, config.rope_theta),
        "max_position_embeddings": config.max_position_embeddings,
    }


def mamba2(config: Any) -> Config:
    spec, heads = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, heads)
    ceiling = spec.decay.dt_ceiling
    limits = [spec.decay.dt_floor, {"__float__": "Infinity"} if ceiling is None else ceiling]
    return {
        "num_heads": heads, "head_dim": V, "state_size": K, "expand": V * heads // config.hidden_size,
        "n_groups": spec.heads.qk_groups or heads, "conv_kernel": spec.inputs.conv, "use_bias": spec.inputs.bias,
        "use_conv_bias": spec.inputs.conv_bias, "time_step_limit": limits, "layer_norm_epsilon": config.norm_eps,
        "rescale_prenorm_residual": False,
    }  # fmt: skip


def qwen3_next(config: Any) -> Config:
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    return {
        "linear_num_value_heads": H, "linear_num_key_heads": spec.heads.qk_groups or H, "linear_key_head_dim": K,
        "linear_value_head_dim": V, "linear_conv_kernel_dim": spec.inputs.conv, "rms_norm_eps": config.norm_eps,
        "intermediate_size": config.intermediate_size, "num_experts": 0,
        "layer_types": ["linear_attention"] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip


def fla(config: Any, **more: Any) -> Config:
    sizes = {name: getattr(config, name) for name in ("num_heads", "intermediate_size", "norm_eps")}
    return sizes | {"max_position_embeddings": config.max_position_embeddings} | more


def gla(config: Any, **more: Any) -> Config:
    heads = config.mixers[0].heads
    return fla(config, expand_k=heads.expand_k, expand_v=heads.expand_v, **more)


def delta_net(config: Any) -> Config:
    spec = config.mixers[0]
    gates = {"use_gate": spec.read.gate != "none", "allow_neg_eigval": spec.write.beta == "sigmoid-2"}
    return gla(config, conv_size=spec.inputs.conv, **gates)


def gated_deltanet(config: Any) -> Config:
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    sizes = {"head_dim": K, "expand_v": V / K, "num_v_heads": H, "conv_size": spec.inputs.conv}
    sizes |= {"num_heads": spec.heads.qk_groups or H, "allow_neg_eigval": spec.write.beta == "sigmoid-2"}
    return fla(config) | sizes


def kda(config: Any) -> Config:
    bound = config.mixers[0].decay.lower_bound
    return gated_deltanet(config) | {"safe_gate": bound is not None, "lower_bound": bound}


def attention(config: Any, **more: Any) -> Config:
    spec = config.mixers[0]
    return fla(config, num_kv_heads=spec.kv_heads, qkv_bias=spec.bias == "qkv", **more)


def transformer(config: Any) -> Config:
    spec = config.mixers[0]
    window = None if spec.pattern is None else spec.pattern.window
    own = {"qk_norm": spec.qk_norm == "head", "window_size": window, "rope_theta": config.rope_theta}
    return attention(config, **own)


def forgetting_transformer(config: Any) -> Config:
    return attention(config, use_output_gate=config.mixers[0].gate == "channel")


def mamba3(config: Any) -> Config:
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    return {
        "head_dim": V, "state_size": K, "expand": V * H // config.hidden_size, "n_groups": spec.heads.qk_groups or H,
        "use_bias": spec.inputs.bias, "rope_fraction": spec.inputs.turns, "norm_eps": config.norm_eps,
        "is_outproj_norm": spec.read.norm != "none",
    }  # fmt: skip


def log_linear_mamba2(config: Any) -> Config:
    own = mamba2(config)
    names = "head_dim", "state_size", "expand", "n_groups", "conv_kernel", "use_bias", "use_conv_bias"
    read = config.mixers[0].read
    norm = {"rmsnorm": read.norm != "none", "norm_before_gate": read.order == "norm-gate", "norm_eps": config.norm_eps}
    return {name: own[name] for name in names} | norm


class Description(NamedTuple):
    """What writes a config.json.

    fields: maps a HeadraceConfig to fields of config.json, without those that all formats share (form.SHARED).
    mixers: the class of the mixers that `fields` accepts."""

    fields: Callable[[Any], Config]
    mixers: type[Spec]


# By format. To the others only models can be exported that were imported from them.
DESCRIPTIONS = {
    "llama": Description(llama, AttentionSpec), "mamba2": Description(mamba2, MixerSpec),
    "qwen3_next": Description(qwen3_next, MixerSpec), "retnet": Description(gla, MixerSpec),
    "gla": Description(gla, MixerSpec), "delta_net": Description(delta_net, MixerSpec),
    "gated_deltanet": Description(gated_deltanet, MixerSpec), "mamba3": Description(mamba3, MixerSpec),
    "transformer": Description(transformer, AttentionSpec), "kda": Description(kda, MixerSpec),
    "forgetting_transformer": Description(forgetting_transformer, AttentionSpec),
    "log_linear_mamba2": Description(log_linear_mamba2, MixerSpec),
}  # fmt: skip
# In these, transformers takes the number of tokens so far from the cache of a layer of softmax attention.
COUNTED_BY_ATTENTION = (
    "qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "granitemoehybrid", "nemotron_h",
    "zamba2", "kimi_linear", "bailing_hybrid", "lfm2", "lfm2_moe", "bamba", "jamba", "recurrent_gemma",
)  # fmt: skip


def has_cache(name: str, config: Any) -> bool:
    """Whether the library of a format can decode the model with its cache."""
    attends = config.stack.style.shared is not None or any(spec.facts.cached for spec in config.mixers)
    return attends or name not in COUNTED_BY_ATTENTION
