"""Models of softmax attention with LayerNorms, in most of which attention and MLP have one input."""

from . import SMALL, Family
from .softmax import ROPES, WINDOWS, rope

UNGROUPED = SMALL | {"intermediate_size": 48, "num_attention_heads": 4}
HEADS = UNGROUPED | {"num_key_value_heads": 2}
PARTIAL = [
    rope("default", partial_rotary_factor=0.5), rope("linear", factor=2.0, partial_rotary_factor=0.5), ROPES["yarn"],
    rope("yarn", factor=4.0, original_max_position_embeddings=32, partial_rotary_factor=0.5),
]  # fmt: skip
UNGATED = {"hidden_act": ["gelu_new", "gelu_pytorch_tanh", "relu", "tanh"]}
SOME = UNGATED | {"num_attention_heads": [2, 8], "rope_parameters": PARTIAL}
PAIRS = {
    "hidden_act": ["gelu_new", "relu"], "num_attention_heads": [2, 8],
    "rope_parameters": [ROPES["yarn"], ROPES["linear"], rope("default")],
}  # fmt: skip
NARROW = [2, {"num_attention_heads": 8} | rope("default", partial_rotary_factor=0.25)]  # the latter turns one channel
GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 300}
GPT |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
NEO = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 300}
NEO |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
FALCON = {name: value for name, value in UNGROUPED.items() if name != "intermediate_size"}
LATER = {"new_decoder_architecture": True}

FAMILIES = {
    "gpt_neox": Family(
        UNGROUPED,
        variants={
            "one after the other": {"use_parallel_residual": False}, "yarn": ROPES["yarn"],
            "tied, without biases": {"tie_word_embeddings": True, "attention_bias": False},
        },
        fields=SOME | {"num_attention_heads": NARROW},
    ),
    "phi": Family(
        HEADS,
        variants={
            "ungrouped": {"num_key_value_heads": None}, "tied": {"tie_word_embeddings": True}, "yarn": ROPES["yarn"]
        },
        fields=SOME,
    ),
    "gptj": Family(
        GPT | {"rotary_dim": 4}, variants={"all channels": {"rotary_dim": 8}, "tied": {"tie_word_embeddings": True}},
        fields={
            "activation_function": ["gelu", "relu", "tanh"], "rotary_dim": [2, 8, None], "n_inner": [48],
            "n_positions": [60],
        },
    ),
    "falcon": Family(
        FALCON,
        variants={
            "one after the other": {"parallel_attn": False, "multi_query": False, "bias": True},
            "two norms": {"new_decoder_architecture": True, "num_kv_heads": 2},
            "one norm": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "bias": True},
            "untied": {"tie_word_embeddings": False, "ffn_hidden_size": 48} | ROPES["yarn"],
        },
        fields={
            "num_attention_heads": [2, 8], "rope_parameters": [ROPES["yarn"], ROPES["linear"]], "alibi": [True],
            "activation": ["gelu_new", "relu", "tanh"], "num_ln_in_parallel_attn": [1, LATER | {"num_kv_heads": 2}],
            "num_kv_heads": [2, LATER | {"num_kv_heads": 2}, LATER | {"num_kv_heads": 1}],
            "parallel_attn": [{"parallel_attn": False}, {"parallel_attn": False, "multi_query": False}],
            "multi_query": [False, LATER | {"multi_query": False}], "new_decoder_architecture": [True],
        },
    ),
    "stablelm": Family(
        HEADS,
        variants={
            "joint": {"use_parallel_residual": True, "use_qkv_bias": True}, "tied": {"tie_word_embeddings": True},
            "yarn": ROPES["yarn"],
        },
        fields=SOME | {"hidden_act": ["gelu_new", "relu"], "num_attention_heads": NARROW},
    ),
    "starcoder2": Family(
        HEADS,
        variants={
            "no biases": {"use_bias": False}, "window": {"sliding_window": 5}, "untied": {"tie_word_embeddings": False},
            "yarn": ROPES["yarn"],
        },
        fields=SOME | {"rope_parameters": [ROPES["yarn"], ROPES["linear"]], "sliding_window": [7]},
    ),
    "olmo": Family(
        HEADS,
        variants={
            "biases": {"attention_bias": True}, "tied": {"tie_word_embeddings": True}, "yarn": ROPES["yarn"]
        },
        fields=SOME | {
            "hidden_act": ["gelu_new", "relu"], "rope_parameters": [ROPES["yarn"], ROPES["linear"]],
            "clip_qkv": [0.5],
        },
    ),
    "nemotron": Family(
        HEADS | {"head_dim": 8},
        variants={"biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}},
        fields=SOME | {"rope_parameters": PARTIAL[:1], "head_dim": [16]},
    ),
    "gpt_bigcode": Family(
        GPT,
        variants={
            "all heads": {"multi_query": False, "tie_word_embeddings": False},
            "no scale": {"scale_attn_weights": False, "n_inner": 48},
        },
        fields={
            "activation_function": ["gelu", "relu", "tanh"], "n_inner": [48], "n_positions": [60],
            "add_cross_attention": [{"add_cross_attention": True, "multi_query": False}],
        },
    ),
    "gpt_neo": Family(
        NEO | {"attention_types": [[["global", "local"], 1]], "window_size": 5},
        variants={"global": {"attention_types": [[["global"], 2]]}, "untied": {"tie_word_embeddings": False}},
        fields={
            "activation_function": ["gelu", "relu", "tanh"], "intermediate_size": [40], "window_size": [7, 1],
            "num_layers": [{"num_layers": 1, "attention_types": [[["local"], 1]]}],
            "attention_types": [[[["local", "global"], 1]]], "max_position_embeddings": [60],
        },
    ),
    "cohere": Family(
        HEADS | {"logit_scale": 0.3}, variants={"biases": {"attention_bias": True}, "yarn": ROPES["yarn"]},
        fields=PAIRS | {"logit_scale": [0.7, 0.0], "use_qk_norm": [True]},
    ),
    "cohere2": Family(
        HEADS | {"logit_scale": 0.3, "sliding_window": 5, "layer_types": WINDOWS},
        variants={"biases": {"attention_bias": True, "tie_word_embeddings": False}},
        fields=PAIRS | {
            "logit_scale": [0.7, 0.0], "sliding_window": [7, 1],
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": WINDOWS[:1]}],
            "layer_types": [{"layer_types": 2 * WINDOWS[:1]}, {"layer_types": 2 * WINDOWS[1:]}],
        },
    ),
    "glm": Family(
        HEADS | {"head_dim": 12},
        variants={"no biases": {"attention_bias": False}, "whole": PARTIAL[0] | {"head_dim": 8}},
        fields=SOME | {"hidden_act": ["gelu_new", "relu"], "head_dim": [16], "eos_token_id": [5]},
    ),
    "glm4": Family(
        HEADS | {"head_dim": 8}, variants={"no biases": {"attention_bias": False, "tie_word_embeddings": True}},
        fields=SOME | {"hidden_act": ["gelu_new", "relu"], "head_dim": [16], "eos_token_id": [5]},
    ),
    "helium": Family(
        HEADS | {"head_dim": 8},
        variants={"biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}},
        fields=PAIRS | {
            "head_dim": [{"head_dim": 16, "num_attention_heads": 2}],
            "hidden_size": [{"hidden_size": 64, "head_dim": 16}],
            "num_attention_heads": [{"head_dim": 16, "num_attention_heads": 2}],
        },
    ),
    "ernie4_5": Family(
        HEADS | {"head_dim": 12}, variants={"biases": {"use_bias": True, "tie_word_embeddings": False}},
        fields=PAIRS | {"head_dim": [16, None]},
    ),
}  # fmt: skip
