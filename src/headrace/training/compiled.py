"""Compiled models in training: whether blocks are compiled, and what `torch.compile` says when it fails."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..extra.compiled import compile_blocks
from ..layers.blocks.block import Block
from ..utils.errors import InputError


def compile_for_training(model: nn.Module, wanted: bool | None, cuda: bool, packed: bool) -> None:
    """Compiles the blocks of a model that is to be trained, if they are to be.

    Args:
        wanted: whether to compile; None: on a CUDA GPU, if the model has blocks and no mixer reads the lengths of
            sequences on the host, which would compile another graph for each length.
        cuda: whether the model is trained on a CUDA GPU. There a block is one graph or an error.
        packed: whether rows hold packed sequences.
    """
    if wanted is None:
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        wanted = cuda and bool(blocks) and not any(block.reads_lengths(packed) for block in blocks)
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
