"""The formats of transformers' Llama, Mamba-2 and Qwen3-Next (models with linear layers only)."""

from typing import Any

from ...spec.attention import AttentionSpec
from ...spec.linear import MixerSpec
from ...utils.errors import InputError
from .form import (
    COMMON,
    SWIGLU,
    Config,
    Format,
    View,
    consecutive,
    conv_size,
    embedding_views,
    interleaved,
    key_heads,
    named,
    require_value,
)


def llama_config(c: Config) -> Config:
    heads, grouped = c["num_attention_heads"], c["num_key_value_heads"] or c["num_attention_heads"]
    require_value({"head_dim": c["head_dim"] or c["hidden_size"] // heads}, "head_dim", c["hidden_size"] // heads)
    return {
        "mixer": "transformer" if grouped == heads else f"transformer(kv_heads={grouped})", "num_heads": heads,
        "intermediate_size": c["intermediate_size"], "rope_theta": rope_theta(c),
    }  # fmt: skip


def rope_theta(c: Config) -> float:
    """The base of rotary positions. Before transformers 5 it was a field of its own, with scaling in rope_scaling."""
    field = "rope_scaling" if c["rope_scaling"] else "rope_parameters"
    rope: Config = c[field] or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.keys() - {"rope_theta", "rope_type", "type"}:
        listed = ", ".join(f"{name}={value!r}" for name, value in rope.items())
        raise InputError(f"config.json has {field} of {listed}; expected rope_type='default' and a rope_theta alone")
    return rope["rope_theta"] if "rope_theta" in rope else c["rope_theta"]


def llama_describe(config: Any) -> Config:
    spec = config.mixers[0]
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": spec.kv_heads or config.num_heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
    }


def llama_layer(config: Any) -> dict[str, View]:
    attention = {f"mixer.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"}
    norms = {"mixer_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
    return named("model.layers.#", attention | norms | SWIGLU)


def mamba2_config(c: Config) -> Config:
    heads, hidden, V = c["num_heads"], c["hidden_size"], c["head_dim"]
    require_value(c, "n_groups", 1)  # transformers normalises each group separately
    limit = [x.get("__float__") if isinstance(x, dict) else x for x in c["time_step_limit"]]
    require_value({"time_step_limit": limit}, "time_step_limit", [0.0, float("inf")], [0.0, "Infinity"])
    require_value({"head_dim": V}, "head_dim", c["expand"] * hidden / heads)
    widths = f"heads.expand_k={c['state_size'] * heads / hidden}, heads.expand_v={V * heads / hidden}"
    mixer = f"mamba2({widths}, inputs.conv={conv_size(c, 'conv_kernel')})"
    return {"mixer": mixer, "num_heads": heads, "mlp": "none"}


def mamba2_describe(config: Any) -> Config:
    spec, heads = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, heads)
    return {
        "num_heads": heads, "head_dim": V, "state_size": K, "expand": V * heads // config.hidden_size,
        "n_groups": key_heads(spec, heads), "conv_kernel": spec.inputs.conv, "layer_norm_epsilon": config.norm_eps,
    }  # fmt: skip


def mamba2_layer(config: Any) -> dict[str, View]:
    """The views of a Mamba-2 layer: in_proj stacks gate, v, k, q and dt; the convolution stacks v, k and q."""
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
    """Layers of Gated DeltaNet with dense MLPs. The gated softmax attention of Qwen3-Next is not supported."""
    depth, every = c["num_hidden_layers"], c["full_attention_interval"]
    kinds = c["layer_types"] or [("linear" if i % every else "full") + "_attention" for i in range(1, depth + 1)]
    require_value({"layer_types": kinds}, "layer_types", ["linear_attention"] * depth)
    sparse = set(range(c["decoder_sparse_step"] - 1, depth, c["decoder_sparse_step"])) - {*(c["mlp_only_layers"] or [])}
    if sparse:
        require_value(c, "num_experts", 0)
    H, hidden = c["linear_num_value_heads"], c["hidden_size"]
    K, V = c["linear_key_head_dim"], c["linear_value_head_dim"]
    widths = f"heads.expand_k={K * H / hidden}, heads.expand_v={V * H / hidden}"
    groups = "none" if c["linear_num_key_heads"] == H else c["linear_num_key_heads"]
    mixer = f"gated-deltanet({widths}, heads.qk_groups={groups}, inputs.conv={conv_size(c, 'linear_conv_kernel_dim')})"
    return {"mixer": mixer, "num_heads": H, "intermediate_size": c["intermediate_size"]}


def qwen_describe(config: Any) -> Config:
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    return {
        "linear_num_value_heads": H, "linear_num_key_heads": key_heads(spec, H), "linear_key_head_dim": K,
        "linear_value_head_dim": V, "linear_conv_kernel_dim": spec.inputs.conv, "rms_norm_eps": config.norm_eps,
        "intermediate_size": config.intermediate_size, "num_experts": 0,
        "layer_types": ["linear_attention"] * config.num_hidden_layers,
    }  # fmt: skip


def qwen_layer(config: Any) -> dict[str, View]:
    """Projections are grouped by key head: q and k of the head, then v and gate of the value heads that share it."""
    spec, H = config.mixers[0], config.num_heads
    K, V = spec.head_dims(config.hidden_size, H)
    groups = key_heads(spec, H)
    wide, shared_heads = H // groups * V, H // groups
    views = interleaved("linear_attn.in_proj_qkvz.weight", groups, {"q": K, "k": K, "v": wide, "gate": wide})
    views |= interleaved("linear_attn.in_proj_ba.weight", groups, {"beta": shared_heads, "decay": shared_heads})
    layer = {f"mixer.in_proj.{part}": view for part, view in views.items()}
    conv = consecutive("linear_attn.conv1d.weight", {"q": groups * K, "k": groups * K, "v": H * V})
    layer |= {f"mixer.conv.weight.{part}": view for part, view in conv.items()}
    layer |= {name: View(f"{name}") for name in SWIGLU}
    own = {
        "decay.A_log": "A_log",
        "decay.dt_bias": "dt_bias",
        "norm_weight": "norm.weight",
        "o_proj.weight": "out_proj.weight",
    }
    layer |= {f"mixer.{ours}": View(f"linear_attn.{theirs}") for ours, theirs in own.items()}
    layer |= {"mixer_norm.weight": View("input_layernorm.weight", offset=1.0)}  # Qwen3-Next stores norm weights minus 1
    layer |= {"mlp_norm.weight": View("post_attention_layernorm.weight", offset=1.0)}
    return {name: view._replace(name=f"model.layers.#.{view.name}") for name, view in layer.items()}


OF_ATTENTION = {
    "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "attention_dropout", "rope_parameters",
    "rope_theta", "rope_scaling", "partial_rotary_factor",
}  # fmt: skip
OF_EXPERTS = {
    "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob",
    "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
OF_INITIAL_VALUES = {"time_step_rank", "time_step_min", "time_step_max", "time_step_floor"}

FORMATS: dict[str, Format] = {
    "llama": Format(
        "LlamaForCausalLM", AttentionSpec, llama_config, llama_describe, llama_layer,
        embedding_views("model", "embed_tokens", "norm"),
        read={
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6, "rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None,
            "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
        },
        only={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
        ignored=COMMON | {"attention_dropout", "pretraining_tp"},
    ),
    "mamba2": Format(
        "Mamba2ForCausalLM", MixerSpec, mamba2_config, mamba2_describe, mamba2_layer,
        embedding_views("backbone", "embeddings", "norm_f"),
        read={
            "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
            "state_size": 128, "expand": 2, "n_groups": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-5,
            "time_step_limit": (0.0, float("inf")), "tie_word_embeddings": False, "pad_token_id": 1, "bos_token_id": 0,
            "eos_token_id": 2,
        },
        only={
            "hidden_act": ("silu", "swish"), "use_bias": (False,), "use_conv_bias": (True,),
            "rescale_prenorm_residual": (False,),  # transformers rescales again whenever it loads
        },
        ignored=COMMON | OF_INITIAL_VALUES | {"chunk_size", "residual_in_fp32"},
    ),
    "qwen3_next": Format(
        "Qwen3NextForCausalLM", MixerSpec, qwen_config, qwen_describe, qwen_layer,
        embedding_views("model", "embed_tokens", "norm", 1.0),
        read={
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
            "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6, "layer_types": None, "full_attention_interval": 4, "num_experts": 512,
            "decoder_sparse_step": 1, "mlp_only_layers": None, "tie_word_embeddings": False, "pad_token_id": None,
            "bos_token_id": None, "eos_token_id": None,
        },
        only={"hidden_act": ("silu", "swish")},
        ignored=COMMON | OF_ATTENTION | OF_EXPERTS,
        cache=False,  # transformers takes the number of tokens so far from a layer of softmax attention
    ),
}  # fmt: skip
