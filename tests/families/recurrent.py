"""Models of scans and of linear mixers without a delta rule."""

from . import SMALL, Family

FAMILIES = {
    "mamba2": Family(
        SMALL | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16},
        fields={
            "hidden_size": [{"hidden_size": 64, "head_dim": 32}], "num_heads": [{"num_heads": 8, "head_dim": 8}],
            "head_dim": [{"head_dim": 32, "num_heads": 2}], "expand": [{"expand": 3, "num_heads": 6}],
            "time_step_limit": [{"time_step_limit": (0.0, 0.1)}],
        },
    ),
}  # fmt: skip
