"""Models of scans and of linear mixers without a delta rule, alone and with attention.

Tests compare with transformers' logits of a sequence by itself and without a cache, where it computes what the layers
are defined to. With a cache, Mamba-2 does not bound its steps (time_step_limit) in the tokens that it decodes one by
one; with padding, RecurrentGemma and RWKV let the padding into their states.
"""

from dataclasses import replace

from . import SMALL, Family

INF = float("inf")
ATTENDED = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 50.0}
ROPES = [{"rope_parameters": ROPE | part} for part in ({}, {"partial_rotary_factor": 0.25})]
WINDOWS = ["full_attention", "sliding_attention"]
PROPORTIONAL = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 90.0, "partial_rotary_factor": 0.5},
    "sliding_attention": ROPE,
}
MAMBA = Family(
    SMALL | {"state_size": 8, "time_step_rank": 3},
    variants={
        "biases": {"use_bias": True, "use_conv_bias": False, "expand": 3},
        "untied": {"tie_word_embeddings": False, "time_step_rank": "auto", "conv_kernel": 2},
    },
    fields={"time_step_init_scheme": ["constant"]},
)
FAMILIES = {
    "mamba2": Family(
        SMALL | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
        variants={
            "groups": {"n_groups": 2, "use_bias": True, "use_conv_bias": False},
            "a group per head, bounded steps": {"n_groups": 4, "time_step_limit": (0.3, 1.0)},
            "tied": {"tie_word_embeddings": True, "time_step_limit": (0.3, INF), "conv_kernel": 2},
        },
        fields={
            "hidden_size": [{"hidden_size": 64, "head_dim": 32}], "num_heads": [{"num_heads": 8, "head_dim": 8}],
            "head_dim": [{"head_dim": 32, "num_heads": 2}], "expand": [{"expand": 3, "num_heads": 6}],
            "n_groups": [2, 4], "time_step_limit": [(0.0, 0.1), (0.2, INF)], "time_step_rank": [3],
        },
    ),
    "mamba": MAMBA,
    "falcon_mamba": replace(MAMBA, base=MAMBA.base | {"layer_norm_epsilon": 1e-2, "mixer_rms_eps": 1e-3}),
    "bamba": Family(
        ATTENDED | {"mamba_n_heads": 4, "mamba_d_state": 8, "attn_layer_indices": [1], "mamba_chunk_size": 16},
        variants={
            "groups and biases": {
                "mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True,
                "mlp_bias": True, "time_step_limit": (0.2, 1.0), "num_hidden_layers": 3,
            },
            "no attention": {"attn_layer_indices": None, "mamba_n_groups": 4, "mamba_n_heads": 8, "mamba_d_conv": 2},
        },
        fields={
            "attn_layer_indices": [[0], [0, 1]], "mamba_d_head": [{"mamba_d_head": 8, "mamba_n_heads": 8}],
            "mamba_expand": [{"mamba_expand": 3, "mamba_d_head": 24}], "time_step_limit": [(0.0, 0.1), (0.2, INF)],
            "mamba_n_heads": [{"mamba_n_heads": 8, "mamba_d_head": 8}], "rope_parameters": ROPES,
            "hidden_size": [{"hidden_size": 64, "mamba_d_head": 32}], "num_hidden_layers": [3],
        },
    ),
    "jamba": Family(
        ATTENDED | {
            "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 3, "mamba_d_state": 8
        },
        variants={
            "dense": {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False},
            "other periods": {
                "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 2, "expert_layer_period": 4,
                "expert_layer_offset": 1, "num_experts_per_tok": 1, "mamba_d_conv": 2,
            },
        },
        fields={
            "attn_layer_period": [3], "attn_layer_offset": [0], "expert_layer_period": [3], "expert_layer_offset": [0],
            "num_hidden_layers": [3],
        },
    ),
    "lfm2": Family(
        ATTENDED | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        variants={
            "biases": {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
            "own width": {"block_auto_adjust_ff_dim": False, "layer_types": ["full_attention", "conv"]},
            "convolutions": {"layer_types": ["conv", "conv"], "block_ffn_dim_multiplier": 1.3},
        },
        fields={
            "layer_types": [["full_attention", "conv"], ["conv", "conv"]], "rope_parameters": ROPES,
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": ["conv"]}],
            "full_attn_idxs": [{"full_attn_idxs": [0], "layer_types": None}],
        },
    ),
    "lfm2_moe": Family(
        ATTENDED | {
            "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
        variants={
            "experts alone": {"num_dense_layers": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
            "MLPs alone": {"num_dense_layers": 2, "conv_bias": True},
        },
        fields={
            "layer_types": [["full_attention", "conv"], ["conv", "conv"]], "rope_parameters": ROPES,
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": ["conv"]}],
        },
    ),
    "lfm3": Family(
        ATTENDED | {
            "layer_types": ["conv", *WINDOWS], "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5,
            "rope_parameters": PROPORTIONAL,
        },
        variants={
            "without gates and norms": {
                "use_attention_gate": False, "use_sandwich_norm": False, "conv_bias": True,
                "tie_word_embeddings": False,
            },
            "attention alone": {
                "layer_types": [*WINDOWS, "full_attention"],
                "rope_parameters": PROPORTIONAL | {"full_attention": ROPE | {"rope_type": "proportional"}},
            },
        },
        fields={
            "layer_types": [["full_attention", "conv", "conv"]],
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": ["conv"]}], "head_dim": [8],
            "rope_parameters": [
                {"rope_parameters": PROPORTIONAL | {"full_attention": own}} for own in (
                    ROPE, PROPORTIONAL["full_attention"] | {"partial_rotary_factor": 0.75},
                    ROPE | {"rope_type": "linear", "factor": 2.0},
                )
            ],
        },
    ),
    "minimax": Family(
        ATTENDED | {
            "num_local_experts": 3, "layer_types": ["linear_attention", "full_attention"], "block_size": 16
        },
        variants={
            "scaled": {
                "full_attn_alpha_factor": 3.5, "full_attn_beta_factor": 0.7, "linear_attn_alpha_factor": 0.6,
                "linear_attn_beta_factor": 1.4, "mlp_alpha_factor": 2.5, "mlp_beta_factor": 0.8, "head_dim": 12,
                "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            },
            "windows": {"layer_types": ["full_attention", "full_attention"], "sliding_window": 5},
            "lightning": {"layer_types": ["linear_attention"] * 2, "num_experts_per_tok": 1},
        },
        fields={
            "layer_types": [["full_attention", "linear_attention"]], "rope_parameters": ROPES,
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": ["linear_attention"]}],
            "head_dim": [12], "sliding_window": [5],
        },
    ),
    "recurrent_gemma": Family(
        ATTENDED | {"block_types": ["recurrent", "attention"], "attention_window_size": 5},
        variants={
            "wide": {"lru_width": 48, "attention_bias": True, "conv1d_width": 2, "num_hidden_layers": 3},
            "untied": {"tie_word_embeddings": False, "block_types": ["attention"], "logits_soft_cap": 2.0},
        },
        fields={
            "block_types": [["recurrent"], ["attention", "recurrent"]], "rope_parameters": ROPES,
            "lru_width": [48], "conv1d_width": [3],
        },
    ),
    "rwkv": Family(
        SMALL | {"intermediate_size": 40},
        variants={"wide": {"attention_hidden_size": 48}, "tied": {"tie_word_embeddings": True}},
        fields={"attention_hidden_size": [48], "intermediate_size": [36], "context_length": [16]},
    ),
}  # fmt: skip
