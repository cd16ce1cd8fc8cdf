"""Models of softmax attention with LayerNorms, in most of which attention and MLP have one input."""

from . import SMALL, Family
from .softmax import ROPES, rope

UNGROUPED = SMALL | {"intermediate_size": 48, "num_attention_heads": 4}
HEADS = UNGROUPED | {"num_key_value_heads": 2}
PARTIAL = [
    rope("default", partial_rotary_factor=0.5), rope("linear", factor=2.0, partial_rotary_factor=0.5), ROPES["yarn"],
    rope("yarn", factor=4.0, original_max_position_embeddings=32, partial_rotary_factor=0.5),
]  # fmt: skip
UNGATED = {"hidden_act": ["gelu_new", "gelu_pytorch_tanh", "relu", "tanh"]}
SOME = UNGATED | {"num_attention_heads": [2, 8], "rope_parameters": PARTIAL}

FAMILIES = {
    "gpt_neox": Family(
        UNGROUPED,
        variants={
            "one after the other": {"use_parallel_residual": False}, "yarn": ROPES["yarn"],
            "tied, without biases": {"tie_word_embeddings": True, "attention_bias": False},
        },
        fields=SOME,
    ),
    "phi": Family(
        HEADS,
        variants={
            "ungrouped": {"num_key_value_heads": None}, "tied": {"tie_word_embeddings": True}, "yarn": ROPES["yarn"]
        },
        fields=SOME,
    ),
}  # fmt: skip
