"""Compilation by region: what stands between the matrix products of a block, fused by `torch.compile`."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...utils.errors import InputError
from .block import Block


def compile_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """Compiles each block of a model by itself, in place, and returns the model.

    The blocks of a model share one compiled graph for all lengths, where `torch.compile(model)` has one that grows with
    the number of layers. Names of parameters do not change.

    Args:
        model: a model of `headrace`, or any module that has its blocks.
        options: of `torch.compile`; unless given, dynamic=True, and Inductor computes norms, activations and gates
            again in the backward, so that they are not kept for it.

    Returns:
        The model.
    """
    default: dict[str, Any] = {} if options.keys() & {"backend", "mode", "options"} else {"backend": recomputing}
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(**{"dynamic": True, **default, **options})
    return model


def recomputing(graph: Any, inputs: Any) -> Any:
    """Inductor as a backend of `torch.compile`, which also recomputes what the backward has to write to memory again.
    By default it keeps those tensors: a third of the memory of a block."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(ban_recompute_materialized_backward=False):
        return compile_fx(graph, inputs)


def compile_for_training(model: nn.Module, wanted: bool | None, cuda: bool, packed: bool) -> None:
    """Compiles the blocks of a model that is to be trained, if they are to be.

    Args:
        wanted: whether to compile; None: on a CUDA GPU, if no mixer reads the lengths of sequences on the host, which
            would compile another graph for each length.
        cuda: whether the model is trained on a CUDA GPU. There a block is one graph or an error.
        packed: whether rows hold packed sequences.
    """
    if wanted is None:
        wanted = cuda and not any(block.reads_lengths(packed) for block in model.modules() if isinstance(block, Block))
    if wanted:
        compile_blocks(model, fullgraph=cuda)


def is_compiled(model: nn.Module) -> bool:
    """Whether modules of the model were compiled in place."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """Returns a context in which compiled blocks of the model run uncompiled, as hooks that read values need."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


@contextmanager
def report_compiler_errors() -> Iterator[None]:
    """Raises InputError with the reason for an error of torch.compile."""
    try:
        yield
    except Exception as error:
        dynamo: Any = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException | dynamo.FailOnRecompileLimitHit):
            raise
        reason = " ".join(str(error).split())
        raise InputError(
            f"compile=true: torch.compile cannot compile the model ({reason}); expected compile=false"
        ) from error
