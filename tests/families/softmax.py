"""Models of softmax attention alone."""

from . import SMALL, Family

HEADS = SMALL | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SHORT = {"short_factor": [1.0, 1.5, 2.0, 3.5], "long_factor": [1.5, 2.5, 4.0, 9.0]}


def rope(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 50.0, **parameters}}


ROPES = {
    "linear": rope("linear", factor=3.0),
    "dynamic": rope("dynamic", factor=3.0) | {"max_position_embeddings": 512},
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "llama3": rope("llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4),
    "longrope": rope("longrope", **SHORT, factor=4.0, original_max_position_embeddings=256),
}  # fmt: skip
# Some of them change within the sequences of the tests, where decoding does not equal a pass of the whole sequence.
FREQUENCIES = {
    "rope_parameters": [
        *ROPES.values(), rope("default"), rope("dynamic", factor=3.0) | {"max_position_embeddings": 16},
        rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=5, beta_slow=0.5, truncate=False),
        rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.0),
        rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3),
        rope("longrope", **SHORT, original_max_position_embeddings=16) | {"max_position_embeddings": 64},
        rope("longrope", **SHORT, factor=4.0, original_max_position_embeddings=16, attention_factor=1.3),
        rope("proportional", factor=2.0), rope("linear", factor=2.0, partial_rotary_factor=0.5),
    ],
    "head_dim": [16, 6],
    "num_attention_heads": [2, 8],
    "hidden_act": ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "tanh"],
}  # fmt: skip
# Of the families beside Llama, whose frequencies and activations the same functions read.
SOME = FREQUENCIES | {"rope_parameters": [ROPES["yarn"], ROPES["longrope"]], "hidden_act": ["gelu_new"]}
ROUTER = {"router_aux_loss_coef": [0.5], "output_router_logits": [True]}
WINDOWS = ["full_attention", "sliding_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
QWEN = {
    "layer_types": [SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}, {"layer_types": WINDOWS}],
    "use_sliding_window": [SLIDING],
    "sliding_window": [SLIDING, SLIDING | {"sliding_window": 1}, SLIDING | {"sliding_window": 0}],
    "max_window_layers": [SLIDING, SLIDING | {"max_window_layers": 0}],
    "num_hidden_layers": [1, 3],
}  # fmt: skip
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 300}
GPT2 |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

LONG_PHI = ROPES["longrope"] | {"max_position_embeddings": 1024, "sliding_window": 2048}
SMOL = 2 * WINDOWS
SMOL_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
MULTIPLIERS = {
    "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 5.0,
}  # fmt: skip

CAPPED = {"final_logit_softcapping": 4.0}
BY_KIND = {
    "head_dim": [16], "num_attention_heads": [2], "sliding_window": [1, 7],
    "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": WINDOWS[:1]}],
    "layer_types": [{"layer_types": WINDOWS[::-1]}, {"layer_types": 2 * WINDOWS[:1]}],
    "rope_parameters": [
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 20.0}}},
        {"rope_parameters": {
            "full_attention": ROPES["llama3"]["rope_parameters"],
            "sliding_attention": ROPES["dynamic"]["rope_parameters"],
        }},
    ],
}  # fmt: skip

FAMILIES = {
    "llama": Family(
        HEADS,
        variants={
            "tied": {"tie_word_embeddings": True}, "ungrouped": {"num_key_value_heads": 4}, "wide": {"head_dim": 12},
            "biases": {"attention_bias": True, "mlp_bias": True}, **ROPES,
        },
        fields=FREQUENCIES,
    ),
    "mistral": Family(
        HEADS | {"sliding_window": 5},
        variants={"no window": {"sliding_window": None}, "wide": {"head_dim": 12}, "yarn": ROPES["yarn"]},
        fields=SOME | {"sliding_window": [1, 7, 100, None]},
    ),
    "qwen2": Family(
        HEADS, variants={"windows": SLIDING, "yarn": ROPES["yarn"]}, fields=SOME | QWEN,
    ),
    "qwen3": Family(
        HEADS | {"head_dim": 12},
        variants={"windows": SLIDING, "yarn": ROPES["yarn"], "biases": {"attention_bias": True}},
        fields=SOME | QWEN,
    ),
    "olmo2": Family(
        HEADS, variants={"biases": {"attention_bias": True}, "yarn": ROPES["yarn"]}, fields=SOME,
    ),
    "phi3": Family(
        HEADS | {"original_max_position_embeddings": 256},
        variants={
            "window": {"sliding_window": 5}, "longrope": LONG_PHI,
            "partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}},
        },
        fields=SOME | {"sliding_window": [1, 7, None]},
    ),
    "smollm3": Family(
        HEADS | {"num_hidden_layers": 4},
        variants={"windows": SMOL_WINDOWS, "biases": {"attention_bias": True, "mlp_bias": True}, "yarn": ROPES["yarn"]},
        fields=SOME | {
            "no_rope_layers": [[0, 0, 0, 0], [1, 1, 0, 1, 0], [1]], "no_rope_layer_interval": [2],
            "use_sliding_window": [SMOL_WINDOWS], "sliding_window": [SMOL_WINDOWS, {"sliding_window": 5}],
            "layer_types": [{"layer_types": SMOL, "sliding_window": 5}, SMOL_WINDOWS | {"layer_types": SMOL}],
        },
    ),
    "olmo3": Family(
        HEADS | {"sliding_window": 5, "layer_types": WINDOWS},
        variants={
            "biases": {"attention_bias": True},
            "frequencies": {"rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
                "full_attention": ROPES["yarn"]["rope_parameters"],
            }},
        },
        fields=BY_KIND | {"hidden_act": ["gelu_new"]},
    ),
    "gemma2": Family(
        HEADS | {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 1.5},
        variants={
            "without caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "biases, untied": {"attention_bias": True, "tie_word_embeddings": False} | CAPPED, "yarn": ROPES["yarn"],
            "dynamic": ROPES["dynamic"] | {"layer_types": 2 * WINDOWS[:1]},
        },
        fields=SOME | {
            "hidden_activation": ["gelu_new"], "query_pre_attn_scalar": [7, 0], "sliding_window": [1, 7],
            "attn_logit_softcapping": [0.3, None, 0.0], "final_logit_softcapping": [4.0, None],
            "use_bidirectional_attention": [True], "num_hidden_layers": [1, 3],
            "layer_types": [{"layer_types": WINDOWS}, {"layer_types": 2 * WINDOWS[:1]}],
        },
    ),
    "gemma3_text": Family(
        HEADS | {"head_dim": 12, "sliding_window": 5, "layer_types": WINDOWS, "query_pre_attn_scalar": 10},
        variants={
            "biases": {"attention_bias": True}, "untied and capped": {"tie_word_embeddings": False} | CAPPED,
            "frequencies": {"rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
                "full_attention": ROPES["linear"]["rope_parameters"],
            }},
        },
        fields=BY_KIND | {
            "hidden_activation": ["gelu_new"], "query_pre_attn_scalar": [7], "attn_logit_softcapping": [3.0],
            "final_logit_softcapping": [4.0], "use_bidirectional_attention": [True],
        },
    ),
    "granite": Family(
        HEADS | MULTIPLIERS, variants={"biases": {"attention_bias": True, "mlp_bias": True}, "yarn": ROPES["yarn"]},
        fields=SOME | {name: [0.7, 0.0] for name in MULTIPLIERS},
    ),
    "qwen3_moe": Family(
        HEADS | {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        variants={
            "normalized": {"norm_topk_prob": True}, "dense": {"mlp_only_layers": [0]},
            "window": {"use_sliding_window": True, "sliding_window": 5},
        },
        fields=SOME | ROUTER | {
            "decoder_sparse_step": [2, 0], "mlp_only_layers": [[1], [0, 1]], "num_experts": [3, 0],
            "num_experts_per_tok": [1, 5], "moe_intermediate_size": [8], "norm_topk_prob": [True],
            "num_hidden_layers": [1, 3],
            "use_sliding_window": [{"use_sliding_window": True, "sliding_window": 7}],
            "sliding_window": [{"use_sliding_window": True, "sliding_window": 1}, {"sliding_window": 9}],
        },
    ),
    "mixtral": Family(
        HEADS | {"num_local_experts": 4, "head_dim": 8},
        variants={"window": {"sliding_window": 5}, "width of heads by default": {"head_dim": None}},
        fields=SOME | ROUTER | {
            "num_local_experts": [3], "num_experts_per_tok": [1, 5], "router_jitter_noise": [0.1],
            "sliding_window": [7],
        },
    ),
    "gpt_oss": Family(
        HEADS | {"head_dim": 12, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2} | ROPES["yarn"],
        variants={
            "no biases, tied": {"attention_bias": False, "tie_word_embeddings": True},
            "one expert": {"num_local_experts": 1, "num_experts_per_tok": 1, "layer_types": 2 * WINDOWS[:1]},
            "bounds": {"swiglu_limit": 0.5, "swiglu_alpha": 3.0},
        },
        fields=SOME | ROUTER | {
            "hidden_act": ["gelu"], "sliding_window": [1, 7], "num_local_experts": [3, 0],
            "num_experts_per_tok": [1, 5], "swiglu_alpha": [0.5, 0.0], "swiglu_limit": [0.3, 0.0],
            "num_hidden_layers": [1, 3],
            "layer_types": [{"layer_types": WINDOWS}, {"layer_types": 2 * WINDOWS[:1]}],
        },
    ),
    "gemma": Family(
        HEADS | {"head_dim": 12}, variants={"untied": {"tie_word_embeddings": False}, "yarn": ROPES["yarn"]},
        fields=SOME,
    ),
    "gpt2": Family(
        GPT2,
        variants={
            "scaled by layer": {"scale_attn_by_inverse_layer_idx": True}, "untied": {"tie_word_embeddings": False},
            "no scale": {"scale_attn_weights": False},
        },
        fields={
            "activation_function": ["gelu", "relu", "tanh", "gelu_pytorch_tanh"], "n_inner": [48], "n_positions": [60],
            "summary_activation": ["tanh"],
        },
    ),
}  # fmt: skip
