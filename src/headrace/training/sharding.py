"""Weights, gradients and moments that are shared out over processes (FSDP2, torch's `fully_shard`), and the weights of
such a model in one piece.

Each block is gathered before it computes and freed after it, as is everything outside the blocks. Processes exchange
float32 numbers: autocast rounds the gathered weights, as it does in one process, and what it rounded stays whole until
the backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ..layers.blocks.block import Block
from ..utils.errors import require


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Shards the parameters of a module over the last dimension of a mesh, and replicates them over the one before it,
    if there is one. The optimizer must be made afterwards."""
    for block in filter(lambda module: isinstance(module, Block), model.modules()):
        fully_shard(block, mesh=mesh)
    # The default would leave the embedding whole after an evaluation, where the gradient's norm does not look for it.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.no_sync = partial(no_sync, model)


@contextmanager
def no_sync(model: FSDPModule) -> Iterator[None]:
    """Keeps gradients in this process instead of summing them over processes."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def whole(x: Any) -> Tensor:
    """The full tensor of one that is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a sharded model in the memory of process 0, tied ones once; nothing in the others. All processes
    must call it."""
    weights: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    again = _tied(model)
    return {name: weight for name, weight in weights.items() if name not in again}


def load_weights(model: Any, folder: Path) -> None:
    """Loads the safetensors of a folder into a model. All processes must call it; a sharded model's are read by process
    0 alone. InputError if a weight is not there."""
    sharded = is_sharded(model)
    files = sorted(folder.glob("*.safetensors")) if not sharded or dist.get_rank() == 0 else []
    weights: dict[str, Any] = {name: x for file in files for name, x in load_file(file).items()}
    missing = [sorted({*model.state_dict()} - {*weights} - _tied(model))]
    if sharded:
        dist.broadcast_object_list(missing)
    require(not missing[0], f"checkpoint {str(folder)!r} has no weights {', '.join(missing[0][:3])}")
    if sharded:  # not strict, as a tied weight is there once
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, weights, options=options)
    else:
        model.load_state_dict(weights, strict=False)


def _tied(model: Any) -> set[str]:
    """The names of parameters that have another name too, by which they are saved."""
    once, all_names = (dict(model.named_parameters(remove_duplicate=unique)).keys() for unique in (True, False))
    return {*all_names} - {*once}
