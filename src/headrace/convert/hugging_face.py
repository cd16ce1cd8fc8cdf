"""transformers' Llama, Mamba-2 and Qwen3-Next (models of its linear layers alone)."""

from typing import Any

from ..errors import InputError
from .form import (
    SWIGLU,
    Config,
    Format,
    View,
    consecutive,
    conv_width,
    demand,
    interleaved,
    key_heads,
    named,
    outside,
    shared,
)


def llama_config(c: Config) -> Config:
    heads = c["num_attention_heads"]
    rope = c.get("rope_parameters") or {"rope_theta": c.get("rope_theta", 10000.0), **(c.get("rope_scaling") or {})}
    demand(c, attention_bias=False, mlp_bias=False, hidden_act="silu")
    demand(rope, rope_type="default")
    demand({"head_dim": c.get("head_dim") or c["hidden_size"] // heads}, head_dim=c["hidden_size"] // heads)
    shared_heads = c.get("num_key_value_heads") or heads
    mixer = "transformer" if shared_heads == heads else f"transformer(kv_heads={shared_heads})"
    return shared(c, "rms_norm_eps") | {
        "mixer": mixer, "num_heads": heads, "intermediate_size": c["intermediate_size"],
        "rope_theta": rope["rope_theta"], "max_position_embeddings": c["max_position_embeddings"],
    }  # fmt: skip


def llama_describe(config: Any) -> Config:
    spec = config.mixers[0]
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": getattr(spec, "kv_heads", None) or config.num_heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "max_position_embeddings": config.max_position_embeddings,
    }


def llama_layer(config: Any) -> dict[str, View]:
    attention = {f"mixer.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"}
    norms = {"mixer_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
    return named("model.layers.#", attention | norms | SWIGLU)


def mamba2_config(c: Config) -> Config:
    heads, hidden = c["num_heads"], c["hidden_size"]
    demand(c, use_bias=False, hidden_act="silu", use_conv_bias=True, n_groups=1)  # theirs norms each group by itself
    limits = [float(x["__float__"] if isinstance(x, dict) else x) for x in c.get("time_step_limit", [])]
    if limits not in ([], [0.0, float("inf")]):
        raise InputError(f"config.json has time_step_limit={limits}; expected no limit")
    widths = f"heads.expand_k={c['state_size'] * heads / hidden}, heads.expand_v={float(c['expand'])}"
    mixer = f"mamba2({widths}, inputs.conv={c['conv_kernel']})"
    return shared(c, "layer_norm_epsilon") | {"mixer": mixer, "num_heads": heads, "mlp": "none"}


def mamba2_describe(config: Any) -> Config:
    spec, heads = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, heads)
    return {
        "num_heads": heads, "head_dim": V, "state_size": K, "expand": V * heads // config.hidden_size,
        "n_groups": key_heads(spec, heads), "conv_kernel": conv_width(spec), "layer_norm_epsilon": config.norm_eps,
    }  # fmt: skip


def mamba2_layer(config: Any) -> dict[str, View]:
    """in_proj holds gate, v, k, q, dt; the convolution v, k, q."""
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    wide, narrow = H * V, key_heads(spec, H) * K
    projected = consecutive("mixer.in_proj", {"gate": wide, "v": wide, "k": narrow, "q": narrow, "decay": H})
    mixed = {
        f"mixer.conv.{kind}.{part}": view
        for kind in ("weight", "bias")
        for part, view in consecutive(f"mixer.conv1d.{kind}", {"v": wide, "k": narrow, "q": narrow}).items()
    }
    own = {
        "mixer_norm.weight": "norm.weight", "mixer.decay.A_log": "mixer.A_log", "mixer.decay.dt_bias": "mixer.dt_bias",
        "mixer.skip": "mixer.D", "mixer.norm_weight": "mixer.norm.weight",
        "mixer.o_proj.weight": "mixer.out_proj.weight",
    }  # fmt: skip
    views = {f"mixer.in_proj.{part}": view._replace(name=f"{view.name}.weight") for part, view in projected.items()}
    views |= mixed
    return {n: v._replace(name=f"backbone.layers.#.{v.name}") for n, v in views.items()} | named(
        "backbone.layers.#", own
    )


def qwen_config(c: Config) -> Config:
    """Layers of Gated DeltaNet and dense MLPs; its softmax attention, which is gated, is not ours."""
    demand({"layer_types": sorted(set(c["layer_types"]))}, layer_types=["linear_attention"])
    if c["num_experts"] and len(c.get("mlp_only_layers") or []) < c["num_hidden_layers"]:
        raise InputError(f"config.json has num_experts={c['num_experts']}; expected 0: dense MLPs alone")
    demand(c, hidden_act="silu")
    H, hidden = c["linear_num_value_heads"], c["hidden_size"]
    K, V = c["linear_key_head_dim"], c["linear_value_head_dim"]
    widths = f"heads.expand_k={K * H / hidden}, heads.expand_v={V * H / hidden}"
    groups = "none" if c["linear_num_key_heads"] == H else c["linear_num_key_heads"]
    mixer = f"gated-deltanet({widths}, heads.qk_groups={groups}, inputs.conv={c['linear_conv_kernel_dim']})"
    return shared(c, "rms_norm_eps") | {"mixer": mixer, "num_heads": H, "intermediate_size": c["intermediate_size"]}


def qwen_describe(config: Any) -> Config:
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    return {
        "linear_num_value_heads": H, "linear_num_key_heads": key_heads(spec, H), "linear_key_head_dim": K,
        "linear_value_head_dim": V, "linear_conv_kernel_dim": conv_width(spec), "rms_norm_eps": config.norm_eps,
        "intermediate_size": config.intermediate_size, "num_experts": 0,
        "layer_types": ["linear_attention"] * config.num_hidden_layers,
    }  # fmt: skip


def qwen_layer(config: Any) -> dict[str, View]:
    """Projections are laid out by key head: its q and k, then v and gate of the value heads that share it."""
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    groups = key_heads(spec, H)
    wide, shared_heads = H // groups * V, H // groups
    views = interleaved("linear_attn.in_proj_qkvz.weight", groups, {"q": K, "k": K, "v": wide, "gate": wide})
    views |= interleaved("linear_attn.in_proj_ba.weight", groups, {"beta": shared_heads, "decay": shared_heads})
    found = {f"mixer.in_proj.{part}": view for part, view in views.items()}
    conv = consecutive("linear_attn.conv1d.weight", {"q": groups * K, "k": groups * K, "v": H * V})
    found |= {f"mixer.conv.weight.{part}": view for part, view in conv.items()}
    found |= {name: View(f"{name}") for name in SWIGLU}
    own = {
        "decay.A_log": "A_log",
        "decay.dt_bias": "dt_bias",
        "norm_weight": "norm.weight",
        "o_proj.weight": "out_proj.weight",
    }
    found |= {f"mixer.{ours}": View(f"linear_attn.{theirs}") for ours, theirs in own.items()}
    found |= {"mixer_norm.weight": View("input_layernorm.weight", offset=1.0)}  # it learns a norm's distance from 1
    found |= {"mlp_norm.weight": View("post_attention_layernorm.weight", offset=1.0)}
    return {name: view._replace(name=f"model.layers.#.{view.name}") for name, view in found.items()}


FORMATS: dict[str, Format] = {
    "llama": Format(
        "LlamaForCausalLM", llama_config, llama_describe, llama_layer, outside("model", "embed_tokens", "norm"),
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 2048},
    ),
    "mamba2": Format(
        "Mamba2ForCausalLM", mamba2_config, mamba2_describe, mamba2_layer, outside("backbone", "embeddings", "norm_f"),
        {"hidden_act": "silu", "use_bias": False, "use_conv_bias": True},
    ),
    "qwen3_next": Format(
        "Qwen3NextForCausalLM", qwen_config, qwen_describe, qwen_layer, outside("model", "embed_tokens", "norm", 1.0),
        {"hidden_act": "silu", "mlp_only_layers": []},
    ),
}  # fmt: skip
