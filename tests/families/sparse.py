"""Models of experts, and of latent attention."""

from . import Family
from .softmax import HEADS, MULTIPLIERS, QWEN, ROPES, ROUTER, SHORT, SLIDING, SOME, WINDOWS, rope

LATENT = HEADS | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
DENSE = {"first_k_dense_replace": 1}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.6)
LATENT_FIELDS = SOME | {
    "rope_parameters": [
        ROPES["yarn"], ROPES["llama3"], ROPES["longrope"], YARN, rope("linear", factor=4.0, mscale_all_dim=0.7),
        rope("default", partial_rotary_factor=0.5),
    ],
    "qk_rope_head_dim": [6, 3], "q_lora_rank": [8], "head_dim": [6], "num_key_value_heads": [2],
    "num_attention_heads": [{"num_attention_heads": 2, "num_key_value_heads": 2}],
}  # fmt: skip
GREEDY = GROUPED | {"topk_method": "group_limited_greedy"}
EXPERTS = {
    "n_routed_experts": [3, 0], "num_experts_per_tok": [1, 5], "n_shared_experts": [2, 0],
    "norm_topk_prob": [True, False], "n_group": [GROUPED, GROUPED | {"n_group": 8}],
    "topk_group": [GROUPED | {"topk_group": 1}, GROUPED],
    "first_k_dense_replace": [0, 1, 2, 5], "output_router_logits": [True],
    "num_mtp_layers": [0, 2], "num_nextn_predict_layers": [0, 2],
}  # fmt: skip
QWEN_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12,
}  # fmt: skip
GRANITE = ROUTER | {name: [0.7, 0.0] for name in MULTIPLIERS} | {
    "num_local_experts": [3, 0], "num_experts_per_tok": [1, 9],
}  # fmt: skip
ALPHA = rope("dynamic", alpha=4.0, factor=1.0)
LONG = {**SHORT, "factor": 4.0, "original_max_position_embeddings": 256}
PHI, PHI_APART = (rope("longrope", **LONG, short_mscale=1.2, long_mscale=long) for long in (1.2, 1.3))
LISTED = {
    "mlp_layer_types": [{"mlp_layer_types": ["sparse", "dense"]}, {"mlp_layer_types": 2 * ["sparse"]}],
    "num_hidden_layers": [{"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}],
}  # fmt: skip
KEXAONE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}

FAMILIES = {
    "deepseek_v2": Family(
        LATENT | ROUTED | DENSE,
        variants={
            "groups": GREEDY, "latent queries": {"q_lora_rank": 8}, "yarn": YARN,
            "biases of MLPs": {"mlp_bias": True, "first_k_dense_replace": 0},
        },
        fields=LATENT_FIELDS | EXPERTS | {
            "topk_method": [GREEDY, "noaux_tc"], "n_group": [GREEDY, GREEDY | {"n_group": 8}],
            "topk_group": [GREEDY | {"topk_group": 1}],
        },
    ),
    "deepseek_v3": Family(
        LATENT | ROUTED | DENSE,
        variants={
            "groups": GROUPED, "latent queries": {"q_lora_rank": 8}, "yarn": YARN, "halves": {"rope_interleave": False},
        },
        fields=LATENT_FIELDS | EXPERTS,
    ),
    "glm4_moe_lite": Family(
        LATENT | ROUTED | {"num_nextn_predict_layers": 1},
        variants={"groups": GROUPED | {"q_lora_rank": 8}, "halves, yarn": YARN | {"rope_interleave": False}},
        fields=LATENT_FIELDS | EXPERTS | LISTED,
    ),
    "exaone_moe": Family(
        HEADS | KEXAONE | {"head_dim": 12, "sliding_window": 5, "layer_types": WINDOWS},
        variants={"groups": {"num_experts": 8, "n_group": 4, "topk_group": 2}},
        fields=SOME | EXPERTS | LISTED | {
            "layer_types": [{"layer_types": WINDOWS[::-1]}, {"layer_types": 2 * WINDOWS[:1]}], "num_experts": [3, 0],
            "sliding_window": [1, 7], "sliding_window_pattern": ["LG"], "num_shared_experts": [2, 0],
            "n_group": [{"num_experts": 8, "n_group": 2}],
            "topk_group": [{"num_experts": 8, "n_group": 4, "topk_group": 3}],
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": WINDOWS[:1], "mlp_layer_types": ["sparse"]}],
        },
    ),
    "flex_olmo": Family(
        HEADS | {"num_experts": 4, "num_experts_per_tok": 2},
        variants={"biases, normalized": {"attention_bias": True, "norm_topk_prob": True}, "yarn": ROPES["yarn"]},
        fields=SOME | ROUTER | {
            "num_experts": [3], "num_experts_per_tok": [1, 5],
        },
    ),
    "glm4_moe": Family(
        HEADS | ROUTED | DENSE | {"head_dim": 12},
        variants={
            "norms, biases": {"use_qk_norm": True, "attention_bias": True},
            "groups": GROUPED | rope("default", partial_rotary_factor=1.0),
        },
        fields=SOME | EXPERTS,
    ),
    "dots1": Family(
        HEADS | ROUTED | DENSE | {"head_dim": 12},
        variants={"windows": {"sliding_window": 5, "max_window_layers": 1}, "biases": {"attention_bias": True}},
        fields=SOME | EXPERTS | {
            "sliding_window": [{"sliding_window": 7, "max_window_layers": 1}], "max_window_layers": [1],
            "layer_types": [{"layer_types": WINDOWS, "sliding_window": 5}], "num_hidden_layers": [1, 3],
        },
    ),
    "youtu": Family(
        LATENT | {"pad_token_id": None},  # whose row transformers sets to 0 when it loads the model
        variants={"halves, latent queries, untied": {
            "rope_interleave": False, "q_lora_rank": 8, "tie_word_embeddings": False,
        }},
        fields=LATENT_FIELDS,
    ),
    "solar_open": Family(
        HEADS | ROUTED | {"head_dim": 12}, variants={"biases, groups": {"attention_bias": True} | GROUPED},
        fields=SOME | EXPERTS,
    ),
    "qwen2_moe": Family(
        HEADS | QWEN_EXPERTS,
        variants={
            "windows": SLIDING, "dense, no biases": {"mlp_only_layers": [0], "qkv_bias": False},
            "normalized": {"norm_topk_prob": True},
        },
        fields=SOME | ROUTER | QWEN | {
            "decoder_sparse_step": [2, 0], "mlp_only_layers": [[1], [0, 1]], "num_experts": [3, 0],
            "num_experts_per_tok": [1, 5], "moe_intermediate_size": [12], "shared_expert_intermediate_size": [8, 0],
        },
    ),
    "olmoe": Family(
        HEADS | {"num_experts": 4, "num_experts_per_tok": 2},
        variants={"biases": {"attention_bias": True}, "normalized, yarn": ROPES["yarn"] | {"norm_topk_prob": True}},
        fields=SOME | ROUTER | {
            "clip_qkv": [0.5], "num_experts": [3], "num_experts_per_tok": [1, 5],
        },
    ),
    "ernie4_5_moe": Family(
        HEADS | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8},
        variants={
            "biases, untied": {"use_bias": True, "tie_word_embeddings": False},
            "all layers, without shared experts": {"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
        },
        fields=SOME | ROUTER | {
            "moe_num_experts": [3, 0], "moe_k": [1, 5], "moe_num_shared_experts": [0, 1],
            "moe_layer_start_index": [0, 2], "moe_layer_end_index": [0, 1, 5], "moe_layer_interval": [2, 3, 0],
            "moe_norm_min": [0.5, 1e-13],
        },
    ),
    "granitemoe": Family(
        HEADS | MULTIPLIERS, variants={"biases, yarn": {"attention_bias": True} | ROPES["yarn"]},
        fields=SOME | GRANITE,
    ),
    "granitemoeshared": Family(
        HEADS | MULTIPLIERS | {"shared_intermediate_size": 20},
        variants={"without shared experts, tied": {"shared_intermediate_size": 0, "tie_word_embeddings": True}},
        fields=SOME | GRANITE | {"shared_intermediate_size": [0, 8]},
    ),
    "minimax_m2": Family(
        HEADS | {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
        variants={"partial rotation": {"rotary_dim": 6}, "yarn": ROPES["yarn"]},
        fields=SOME | ROUTER | {
            "num_local_experts": [3, 0], "num_experts_per_tok": [1, 5], "router_jitter_noise": [0.1],
        },
    ),
    "hunyuan_v1_moe": Family(
        HEADS | {"num_experts": 4, "moe_topk": 2, "head_dim": 12},
        variants={
            "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
            "list, alpha": ALPHA | {"moe_topk": [3, 3]},
        },
        fields=SOME | {
            "rope_parameters": [ALPHA, ROPES["yarn"]], "num_experts": [3, 0], "moe_topk": [1, [3, 3], [1, 2], 5, 0],
            "output_router_logits": [True],
        },
    ),
    "phimoe": Family(
        HEADS | {"num_local_experts": 4, "router_jitter_noise": 0.4},
        variants={
            "biases, window": {"attention_bias": True, "lm_head_bias": True, "sliding_window": 5},
            "longrope": PHI, "longrope, wide window": PHI | {"sliding_window": 512, "max_position_embeddings": 512},
        },
        fields=SOME | ROUTER | {
            "rope_parameters": [PHI, PHI_APART, rope("linear", factor=2.0, short_mscale=1.0, long_mscale=1.0)],
            "num_local_experts": [3, 1], "num_experts_per_tok": [1, 3], "router_jitter_noise": [0.01, 0.0, 0.8],
            "input_jitter_noise": [0.1],
            "sliding_window": [7], "lm_head_bias": [True],
        },
    ),
}  # fmt: skip
