"""What a token mixer and a model are, as data."""

from .linear import (
    AttentionSpec,
    Competition,
    Decay,
    Heads,
    Inputs,
    MatrixSpec,
    MixerSpec,
    Pattern,
    Read,
    ScanSpec,
    SoftmaxRNNSpec,
    Spec,
    Write,
    change,
    from_json,
    to_json,
)

__all__ = [
    "AttentionSpec", "Competition", "Decay", "Heads", "Inputs", "MatrixSpec", "MixerSpec", "Pattern", "Read",
    "ScanSpec", "SoftmaxRNNSpec", "Spec", "Write", "change", "from_json", "to_json",
]  # fmt: skip
