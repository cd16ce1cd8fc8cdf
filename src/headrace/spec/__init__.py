"""Specs: token mixers and models described by frozen dataclasses."""

from .attention import AttentionSpec, LatentSpec, Pattern, Rope
from .decay import Decay
from .linear import Competition, Heads, Inputs, MixerSpec, Read, Write
from .matrix import MatrixSpec
from .scan import ScanSpec
from .serialize import Spec, change, from_json, to_json

__all__ = [
    "AttentionSpec", "Competition", "Decay", "Heads", "Inputs", "LatentSpec", "MatrixSpec", "MixerSpec", "Pattern",
    "Read", "Rope", "ScanSpec", "Spec", "Write", "change", "from_json", "to_json",
]  # fmt: skip
