"""Compilation by region: what stands between the matrix products of a block, fused by `torch.compile`."""

from typing import Any

from torch import nn

from .block import Block


def compile_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """Compiles each block of a model by itself, in place, and returns the model.

    The blocks of a model share one compiled graph for all lengths, where `torch.compile(model)` has one that grows with
    the number of layers. Names of parameters do not change.

    Args:
        model: a model of `headrace`, or any module that has its blocks.
        options: of `torch.compile`; dynamic=True unless given.

    Returns:
        The model.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(**{"dynamic": True, **options})
    return model
