"""Hybrids of delta rules and softmax attention."""

from . import SMALL, Family
from .softmax import rope

BOTH = ["linear_attention", "full_attention"]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = HEADS | {"intermediate_size": 48, "layer_types": BOTH}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 8, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
ROPES = [
    rope("default", partial_rotary_factor=0.5), rope("linear", factor=2.0, partial_rotary_factor=1.0),
    rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7),
    rope("default", partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True),
    rope("yarn", factor=4.0, original_max_position_embeddings=32, partial_rotary_factor=0.5),
    rope("linear", factor=4.0, mscale_all_dim=0.7),
]  # fmt: skip
KINDS = {
    "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": BOTH[:1]}],
    "layer_types": [{"layer_types": BOTH[::-1]}],
}  # fmt: skip
TIED = {"tied, with biases": {"tie_word_embeddings": True, "attention_bias": True}}
QWEN = KINDS | {"rope_parameters": ROPES, "head_dim": [8]}
LING = {"num_expert_group": 2, "topk_group": 1}
MIXED = {
    "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": BOTH[:1], "mlp_layer_types": ["dense"]}],
    "layer_types": [{"layer_types": BOTH[::-1]}], "mlp_layer_types": [{"mlp_layer_types": ["sparse", "dense"]}],
    "q_lora_rank": [8], "num_attention_heads": [{"num_attention_heads": n, "num_key_value_heads": 2} for n in (2, 8)],
}  # fmt: skip

FAMILIES = {
    "qwen3_next": Family(
        SMALL | SIZES | DELTA | EXPERTS | {"head_dim": 16, "decoder_sparse_step": 2},
        variants=TIED | {
            "linear layers alone": {"layer_types": BOTH[:1] * 2, "num_experts": 0},
            "attention alone": {"layer_types": BOTH[1:] * 2},
        },
        fields=QWEN | {"mlp_only_layers": [[0, 0], [1]]},
    ),
    "qwen3_5_text": Family(SMALL | SIZES | DELTA | {"head_dim": 16}, TIED, QWEN),
    "qwen3_5_moe_text": Family(SMALL | SIZES | DELTA | EXPERTS | {"head_dim": 16}, TIED, QWEN),
    "lara_mini": Family(
        SMALL | HEADS | DELTA | EXPERTS | {
            "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 3, "layer_types": [*BOTH, "sliding_attention"],
        },
        variants={
            "untied, with biases": {"tie_word_embeddings": False, "attention_bias": True, "norm_topk_prob": False},
        },
        fields={
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": BOTH[:1]}], "head_dim": [8],
            "layer_types": [["sliding_attention"] * 3, BOTH[:1] * 3], "rope_parameters": ROPES[1:3],
        },
    ),
    # transformers saves the convolutions of q, k and v as three equal parts, whatever their widths are
    "olmo_hybrid": Family(
        SMALL | SIZES | DELTA | {"linear_num_key_heads": 4, "linear_value_head_dim": 8},
        variants={
            "unrotated": {"rope_parameters": None}, "positive": {"linear_allow_neg_eigval": False},
        },
        fields=KINDS | {
            "num_hidden_layers": [{"num_hidden_layers": 3, "layer_types": [*BOTH, BOTH[0]]}],
            "rope_parameters": ROPES, "linear_key_head_dim": [{"linear_key_head_dim": 4, "linear_value_head_dim": 4}],
            "linear_value_head_dim": [{"linear_key_head_dim": 6, "linear_value_head_dim": 6}],
            "linear_num_value_heads": [{"linear_num_key_heads": 2, "linear_num_value_heads": 2}],
            "linear_num_key_heads": [{"linear_num_key_heads": 2, "linear_num_value_heads": 2}],
        },
    ),
    "kimi_linear": Family(
        SMALL | SIZES | LATENT | {"linear_head_dim": 8, "linear_num_heads": 4},
        variants={"latent queries": {"q_lora_rank": 8}, "two shared experts": {"num_shared_experts": 2}},
        fields=MIXED,
    ),
    "bailing_hybrid": Family(
        SMALL | SIZES | LATENT | LING | {"head_dim": 8},
        variants={"unbounded decay": {"kda_safe_gate": False}, "latent queries": {"q_lora_rank": 8}},
        fields=MIXED | {"rope_parameters": ROPES},
    ),
}  # fmt: skip
