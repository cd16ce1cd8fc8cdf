"""Models of scans and of linear mixers without a delta rule."""

from . import SMALL, Family

INF = float("inf")
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
        real={  # Mamba-Codestral 7B
            "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
            "state_size": 128, "expand": 2, "n_groups": 8, "pad_token_id": 0,
        },
    ),
    "mamba": Family(
        SMALL | {"state_size": 8, "time_step_rank": 3},
        variants={
            "biases": {"use_bias": True, "use_conv_bias": False, "expand": 3},
            "untied": {"tie_word_embeddings": False, "time_step_rank": "auto", "conv_kernel": 2},
        },
        fields={"time_step_init_scheme": ["constant"]},
        real={  # mamba-2.8b
            "vocab_size": 50280, "hidden_size": 2560, "num_hidden_layers": 64, "time_step_rank": 160,
        },
    ),
}  # fmt: skip
