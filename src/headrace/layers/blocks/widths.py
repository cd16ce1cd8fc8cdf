"""Defaults that follow from the hidden size, and numbers of parameters and operations."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ...ops.checks import require
from ..base import Recurrence


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


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Returns the number of parameters of the module that build() makes; tied ones count once. Allocates no memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in build().parameters())


def match_intermediate_size(build: Callable[[int], nn.Module], target: int) -> int:
    """Returns the MLP width with which the model build(width) has the number of parameters nearest to `target`.

    The number of parameters is linear in the width, so that two models are counted. Raises InputError if the model has
    no MLP, or more than `target` parameters with width 1."""
    least, per_width = count_parameters(partial(build, 1)), count_parameters(partial(build, 2))
    per_width -= least
    require(per_width > 0, f"the model has {least} parameters for every MLP width; expected a model with an MLP")
    width = round(1 + (target - least) / per_width)
    require(width >= 1, f"the model has {least} parameters with the narrowest MLP; expected at most target={target}")
    return width


def matrix_products(counter: FlopCounterMode, model: nn.Module) -> int:
    """The FLOPs that PyTorch counted in a forward pass of the model, without those of recurrences."""
    root, counted = type(model).__name__, counter.get_flop_counts()
    recurrences = [f"{root}.{name}" for name, module in model.named_modules() if isinstance(module, Recurrence)]
    return counter.get_total_flops() - sum(sum(counted[name].values()) for name in recurrences if name in counted)
