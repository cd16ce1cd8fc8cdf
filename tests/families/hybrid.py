"""Hybrids of Mamba-2 and softmax attention.

With a bias of Mamba-2's input projection, transformers' padding reaches the first tokens through the convolution, and
its cached steps do not bound the step size. What is right is the row without padding and without a cache.
"""

from . import SMALL, Family

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA, BOTH = "linear_attention", ["linear_attention", "full_attention"]
ROPE = [{"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0}}]  # fmt: skip
WITHOUT_DEPTH = {name: value for name, value in SMALL.items() if name != "num_hidden_layers"}
NEMOTRON = [MAMBA, "moe", "full_attention", "mlp", MAMBA, MAMBA, "mlp"]

FAMILIES = {
    "falcon_h1": Family(
        SMALL | HEADS
        | {"intermediate_size": 48, "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 2}
        | {"mamba_d_state": 8, "mamba_chunk_size": 16, "embedding_multiplier": 5.6, "lm_head_multiplier": 0.04}
        | {"mlp_multipliers": [0.9, 0.2], "key_multiplier": 0.4, "attention_out_multiplier": 0.9}
        | {"attention_in_multiplier": 1.1, "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.3]}
        | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.24},
        variants={
            "biases and norms": {
                "attention_bias": True, "mlp_bias": True, "projectors_bias": True, "mamba_proj_bias": True,
                "mamba_rms_norm": True, "head_dim": 12,
            },
            "tied, gate before the norm": {
                "tie_word_embeddings": True, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
                "mamba_n_groups": 1,
            },
        },
        fields={
            "hidden_size": [48], "num_attention_heads": [8, 2], "rope_parameters": ROPE,
            "mamba_d_ssm": [{"mamba_d_ssm": 32, "mamba_d_head": 8}, {"mamba_d_ssm": None, "mamba_d_head": 16}],
            "mamba_d_head": [{"mamba_d_ssm": 32, "mamba_d_head": 8}],
            "mamba_n_heads": [{"mamba_n_heads": 8, "mamba_d_head": 6}], "mamba_n_groups": [4, 1],
            "mamba_norm_before_gate": [{"mamba_norm_before_gate": False, "mamba_rms_norm": True}],
            "time_step_limit": [{"time_step_limit": (0.1, 0.5)}], "mlp_multipliers": [[0.5, 2.0]],
            "ssm_multipliers": [[0.5, 2.0, 0.7, 1.5, 0.3]],
        },
    ),
    "granitemoehybrid": Family(
        SMALL | HEADS
        | {"intermediate_size": 20, "shared_intermediate_size": 28, "num_local_experts": 4, "layer_types": BOTH}
        | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
        | {"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.0078125},
        variants={
            "dense, with positions": {"num_local_experts": 0, "position_embedding_type": "rope"},
            "tied, biases": {
                "tie_word_embeddings": True, "attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False,
                "mamba_n_groups": 1,
            },
        },
        fields={
            "hidden_size": [{"hidden_size": 64, "mamba_d_head": 32}], "layer_types": [BOTH[::-1], [MAMBA, MAMBA]],
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": [MAMBA]}],
            "position_embedding_type": ["rope", "nope"],
            "mamba_n_heads": [{"mamba_n_heads": 8, "mamba_d_head": 8}], "mamba_n_groups": [4, 1],
            "mamba_d_head": [{"mamba_d_head": 32, "mamba_expand": 4}],
            "mamba_expand": [{"mamba_d_head": 32, "mamba_expand": 4}],
            "rope_parameters": [each | {"position_embedding_type": "rope"} for each in ROPE],
            "time_step_limit": [{"time_step_limit": (0.1, 0.5)}], "num_local_experts": [0, 6],
        },
    ),
    "nemotron_h": Family(
        WITHOUT_DEPTH | HEADS
        | {"layers_block_type": NEMOTRON, "intermediate_size": 24, "head_dim": 12, "mamba_num_heads": 4}
        | {"mamba_head_dim": 20, "n_groups": 2, "ssm_state_size": 8, "moe_intermediate_size": 20, "chunk_size": 16}
        | {"moe_shared_expert_intermediate_size": 28, "n_routed_experts": 8},
        variants={
            "latent experts in groups, biases": {
                "moe_latent_size": 12, "mlp_bias": True, "use_bias": True, "n_group": 4, "topk_group": 2,
                "num_experts_per_tok": 3, "routed_scaling_factor": 2.5,
            },
            "no experts": {"layers_block_type": ["full_attention", "mlp", MAMBA, MAMBA], "mlp_hidden_act": "gelu"},
        },
        fields={
            "layers_block_type": [NEMOTRON[:2], [MAMBA, "mlp", "mlp"], ["mlp", MAMBA]],
            "hidden_size": [48], "n_groups": [4, 1], "mamba_num_heads": [8], "moe_latent_size": [12],
            "n_group": [{"n_group": 4, "topk_group": 2}], "topk_group": [{"n_group": 4, "topk_group": 3}],
            "sliding_window": [4], "mtp_layers_block_type": [[MAMBA]], "time_step_limit": [(0.1, 0.5)],
            "num_nextn_predict_layers": [1], "mamba_ssm_cache_dtype": ["float64"], "time_step_min": [0.5],
        },
    ),
    "zamba2": Family(
        WITHOUT_DEPTH
        | {"num_hidden_layers": 4, "layers_block_type": [MAMBA, "hybrid", "hybrid", "hybrid"], "adapter_rank": 3}
        | {"intermediate_size": 24, "num_attention_heads": 4, "n_mamba_heads": 4, "mamba_ngroups": 2}
        | {"mamba_d_state": 8, "num_mem_blocks": 2, "chunk_size": 16},
        variants={
            "one block, positions, adapters of attention": {
                "num_mem_blocks": 1, "use_mem_rope": True, "use_shared_attention_adapter": True,
            },
            "biases, untied, grouped": {
                "add_bias_linear": True, "tie_word_embeddings": False, "num_key_value_heads": 2, "mamba_ngroups": 1,
                "num_mem_blocks": 3,
            },
            "without attention": {"layers_block_type": [MAMBA] * 4},
        },
        fields={
            "layers_block_type": [[MAMBA] * 4, ["hybrid"] * 4], "hidden_size": [64],
            "num_hidden_layers": [{"num_hidden_layers": 2, "layers_block_type": ["hybrid", MAMBA]}],
            "num_attention_heads": [8, 2], "num_key_value_heads": [2], "n_mamba_heads": [8], "mamba_ngroups": [4, 1],
            "num_mem_blocks": [1, 3, 5], "use_mem_rope": [True], "time_step_min": [0.5],
            "rope_parameters": [each | {"use_mem_rope": True} for each in ROPE], "use_long_context": [True],
        },
    ),
}  # fmt: skip
