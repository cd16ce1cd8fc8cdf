"""Defaults that follow from the hidden size."""

import math


def default_intermediate_size(hidden_size: int, gated: bool = True) -> int:
    """Returns the default width of an MLP: 4 D, or 8/3 D for a gated MLP, whose three matrices then have as many
    parameters as the two of the other (arXiv 2002.05202). 8/3 D is rounded up to a multiple of 256 as in
    flash-linear-attention, or of 16 for D < 256."""
    if not gated:
        return 4 * hidden_size
    multiple = 256 if hidden_size >= 256 else 16
    return -(-(8 * hidden_size // 3) // multiple) * multiple


def default_std(hidden_size: int) -> float:
    """Returns the default standard deviation of initial weights, 0.64 / √D: the 0.02 of BERT and flash-linear-attention
    is this number at D = 1024, and too small for a narrower model."""
    return 0.64 / math.sqrt(hidden_size)
