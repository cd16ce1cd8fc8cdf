"""Specs: token mixers and models described by frozen dataclasses."""

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
