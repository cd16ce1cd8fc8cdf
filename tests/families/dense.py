"""Further models of softmax attention with dense MLPs."""

from . import Family
from .parallel import UNGATED, UNGROUPED
from .softmax import CAPPED, FREQUENCIES, HEADS, MULTIPLIERS, ROPES, SOME, WINDOWS, rope

BIASES = {"attention_bias": True, "mlp_bias": True}
BIASED = {"attention_bias": True, "tie_word_embeddings": True}
SLIDING = HEADS | {"sliding_window": 5, "layer_types": WINDOWS[::-1]}
BY_LAYER = SOME | {
    "sliding_window": [1, 7, 0], "num_hidden_layers": [{"num_hidden_layers": 3, "layer_types": [*WINDOWS, WINDOWS[1]]}],
    "layer_types": [{"layer_types": WINDOWS}, {"layer_types": 2 * WINDOWS[:1]}, {"layer_types": 2 * WINDOWS[1:]}],
}  # fmt: skip
SQUARED = SOME | {"hidden_act": ["gelu_new", "silu", "relu"]}
ALIAS = Family(HEADS | {"head_dim": 12}, variants={"biases": BIASES, "llama3": ROPES["llama3"]}, fields=SOME)
OPT = {name: value for name, value in UNGROUPED.items() if name != "intermediate_size"}
OPT |= {"ffn_dim": 48, "max_position_embeddings": 300}


def growing(kind, beta, **parameters):
    return rope(kind, llama_4_scaling_beta=beta, original_max_position_embeddings=7, **parameters)


FAMILIES = {
    "seed_oss": Family(
        HEADS | {"head_dim": 12},
        variants={
            "all biases": BIASES | {"attention_out_bias": True}, "no biases": {"attention_bias": False},
            "one bias, tied": {"attention_bias": False, "attention_out_bias": True, "tie_word_embeddings": True},
            "yarn": ROPES["yarn"],
        },
        fields=SOME | {"pretraining_tp": [2]},
    ),
    "arcee": Family(HEADS, variants={"biases": BIASES, "yarn": ROPES["yarn"]}, fields=SQUARED),
    "exaone": ALIAS,
    "exaone4": Family(
        SLIDING,
        variants={
            "no window": {"sliding_window": None, "layer_types": 2 * WINDOWS[:1]}, "llama3": ROPES["llama3"],
            "no positions": {"layer_types": 2 * WINDOWS[:1]}, "tied": {"tie_word_embeddings": True},
        },
        fields=BY_LAYER | {"sliding_window_pattern": [{"sliding_window_pattern": 2, "layer_types": None}, "LLLG"]},
    ),
    "internlm3": Family(
        HEADS, variants={"biases": BIASES, "dynamic": ROPES["dynamic"]},
        fields=SOME | {"attention_bias": [BIASES], "mlp_bias": [BIASES]},
    ),
    "iquestcoder": ALIAS,
    "ministral": Family(SLIDING | {"head_dim": 12}, variants={"in all layers": {"layer_types": None}}, fields=BY_LAYER),
    "ministral3": Family(
        HEADS | {"head_dim": 12} | growing("yarn", 0.3, factor=4.0, mscale=1, mscale_all_dim=1),
        variants={
            "window": {"sliding_window": 5}, "of a default": {"rope_parameters": None},
            "llama3": growing("llama3", 0.5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4),
            "no growth": growing("yarn", 0.0, factor=4.0),
        },
        fields=SOME | {
            "rope_parameters": [
                growing("yarn", -0.1, factor=8.0), growing("dynamic", 0.3, factor=8.0), growing("default", 0.1),
            ],
            "sliding_window": [1, 7],
        },
    ),
    "cwm": Family(
        SLIDING | {"head_dim": 12} | ROPES["llama3"],
        variants={"biases, tied": {"mlp_bias": True, "tie_word_embeddings": True}},
        fields=BY_LAYER | {"pretraining_tp": [2], "bos_token_id": [2], "eos_token_id": [2, [2, 3]]},
    ),
    "vaultgemma": Family(
        SLIDING | {"head_dim": 12, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 1.5},
        variants={
            "without caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 7},
            "biases, untied": {"attention_bias": True, "tie_word_embeddings": False} | CAPPED,
        },
        fields=BY_LAYER | {
            "hidden_activation": ["gelu_new"], "query_pre_attn_scalar": [7, 0],
            "attn_logit_softcapping": [0.3, None, 0.0], "final_logit_softcapping": [4.0, None],
        },
    ),
    "jais2": Family(
        HEADS, variants={"no biases": dict.fromkeys(BIASES, False), "yarn": ROPES["yarn"]}, fields=SQUARED,
    ),
    "hyperclovax": Family(
        HEADS | MULTIPLIERS,
        variants={
            "biases": BIASES, "norms before alone": {"use_post_norm": False}, "yarn": ROPES["yarn"],
            "no factors": dict.fromkeys(MULTIPLIERS, 1.0) | {"attention_multiplier": None},
        },
        fields=SOME | {name: [0.7, 0.0] for name in MULTIPLIERS},
    ),
    "hunyuan_v1_dense": Family(
        HEADS | {"head_dim": 8},
        variants={
            "alpha": rope("dynamic", alpha=50.0, factor=1.0, beta_fast=32, mscale=1.0), "wide": {"head_dim": 12},
            "biases, tied": BIASED, **ROPES,
        },
        fields=FREQUENCIES | {
            "rope_parameters": [*FREQUENCIES["rope_parameters"], rope("dynamic", alpha=7.0)], "pretraining_tp": [2],
        },
    ),
    "nanochat": Family(
        HEADS, variants={"biases, tied": BIASED, "llama3": ROPES["llama3"], "dynamic": ROPES["dynamic"]},
        fields=SQUARED | {
            "rope_parameters": [ROPES["llama3"], ROPES["yarn"], ROPES["dynamic"]],
            "final_logit_softcapping": [4.0, None],
        },
    ),
    "apertus": Family(
        HEADS | {"head_dim": 12}, variants={"biases, tied": BIASED, "another activation": {"hidden_act": "relu2"}},
        fields=SQUARED | {"hidden_act": ["silu", "relu2", "gelu_new"]},
    ),
    "opt": Family(
        OPT,
        variants={
            "no biases": {"enable_bias": False}, "untied": {"tie_word_embeddings": False},
            "norms without weights": {"layer_norm_elementwise_affine": False},
        },
        fields={
            "activation_function": UNGATED["hidden_act"], "num_attention_heads": [2, 8], "word_embed_proj_dim": [16],
            "max_position_embeddings": [60],
        },
    ),
}  # fmt: skip
