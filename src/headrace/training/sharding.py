"""Weights, gradients and moments that are shared out over processes (FSDP2, torch's `fully_shard`), and the weights of
such a model in one piece.

Each block is gathered before it computes and freed after it, as is everything outside the blocks. Processes exchange
float32 numbers: autocast rounds the gathered weights, as it does in one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, device, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..layers.block import Block


def shard(model: nn.Module, where: device, processes: int) -> None:
    """Shares out the parameters over each group of `processes` consecutive processes; the groups have the same ones.

    where: the device of this process. The optimiser must be made afterwards."""
    groups = dist.get_world_size() // processes
    mesh = init_device_mesh(where.type, (groups, processes), mesh_dim_names=("dp_replicate", "dp_shard"))
    mesh = mesh if groups > 1 else mesh["dp_shard"]
    for block in filter(lambda module: isinstance(module, Block), model.modules()):
        fully_shard(block, mesh=mesh)
    # Otherwise the embedding would stay whole after an evaluation, and the optimiser would not see it.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.no_sync = partial(no_sync, model)  # accelerate enters it for all but the last part of a step


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


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a sharded model in the memory of process 0; empty in the others. All processes must call it."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_weights(model: nn.Module, folder: Path) -> None:
    """Loads the safetensors of a folder, which process 0 reads, into a sharded model. All processes must call it."""
    weights: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)  # no copy of a tied weight
    set_model_state_dict(model, weights, options=options)
