"""Specs: token mixers and models described by frozen dataclasses."""

from .attention import AttentionSpec, Pattern, Rope
from .decay import Decay
from .linear import Competition, Heads, Inputs, MixerSpec, Read, Write
from .serialize import Spec, change, from_json, to_json

__all__ = [
    "AttentionSpec", "Competition", "Decay", "Heads", "Inputs", "MixerSpec", "Pattern",
    "Read", "Rope", "Spec", "Write", "change", "from_json", "to_json",
]  # fmt: skip
