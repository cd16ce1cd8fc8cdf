"""Compilation by region: what stands between the matrix products of a block, fused by `torch.compile`."""

from typing import Any

from torch import nn

from ..layers.blocks.block import Block
from ..ops.checks import check_module, require


def compile_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """Compiles each block of a model by itself, in place, and returns the model.

    The blocks of a model share one compiled graph for all lengths, where `torch.compile(model)` has one that grows with
    the number of layers. Names of parameters do not change.

    Args:
        model: a model of `headrace`, or any module that has its blocks. Raises InputError for one without.
        options: of `torch.compile`; unless given, dynamic=True, and Inductor computes norms, activations and gates
            again in the backward, so that they are not kept for it.

    Returns:
        The model.
    """
    check_module(model=model)
    default: dict[str, Any] = {} if options.keys() & {"backend", "mode", "options"} else {"backend": recomputing}
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    require(blocks != [], f"model is a {type(model).__name__} without blocks of headrace; expected one that has some")
    for block in blocks:
        block.compile(**{"dynamic": True, **default, **options})
    return model


def recomputing(graph: Any, inputs: Any) -> Any:
    """Inductor as a backend of `torch.compile`, which also recomputes what the backward has to write to memory again.
    By default it keeps those tensors: a third of the memory of a block."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(ban_recompute_materialized_backward=False):
        return compile_fx(graph, inputs)
