"""Hybrids of delta rules and softmax attention."""

from . import SMALL, Family

LINEAR = ["linear_attention"] * 2
FAMILIES = {
    "qwen3_next": Family(
        SMALL
        | {"intermediate_size": 48, "num_experts": 0, "layer_types": LINEAR, "linear_key_head_dim": 8}
        | {"linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        fields={
            "num_hidden_layers": [{"num_hidden_layers": 1, "layer_types": LINEAR[:1]}],
            "layer_types": [{"layer_types": ["linear_attention", "full_attention"]}],
            "rope_parameters": [{"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}],
            "mlp_only_layers": [[0, 0]], "num_experts": [{"num_experts": 2, "num_experts_per_tok": 1}],
        },
    ),
}  # fmt: skip
