"""Specs: token mixers and models described by frozen dataclasses."""

from .attention import AttentionSpec, Pattern
from .decay import Decay
from .linear import Competition, Heads, Inputs, MixerSpec, Read, Write
from .matrix import MatrixSpec
from .scan import ScanSpec
from .serialise import Spec, change, from_json, to_json
from .softmax_rnn import SoftmaxRNNSpec

__all__ = [
    "AttentionSpec", "Competition", "Decay", "Heads", "Inputs", "MatrixSpec", "MixerSpec", "Pattern", "Read",
    "ScanSpec", "SoftmaxRNNSpec", "Spec", "Write", "change", "from_json", "to_json",
]  # fmt: skip
