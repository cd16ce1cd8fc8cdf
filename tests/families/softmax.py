"""Models of softmax attention alone."""

from . import SMALL, Family

FAMILIES = {
    "llama": Family(
        SMALL | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
        variants={"tied": {"tie_word_embeddings": True}, "ungrouped": {"num_key_value_heads": 4}},
        fields={"rope_parameters": [{"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}]},
        real={"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
}  # fmt: skip
