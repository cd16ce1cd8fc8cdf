"""The processes of torchrun: how they start, form groups, and end when one of them no longer answers."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from transformers import TrainingArguments

from ..files.processes import end_with_parent
from ..utils.errors import InputError
from .recipes import Recipe

TIMEOUT = 1800  # seconds
PARALLEL = ("context_parallel", "shard")  # fields of a recipe that say which processes work together
ANSWER = timedelta(seconds=10)  # in which processes that lost another one tell each other


def check_launcher(recipe: Recipe, timeout: int) -> None:
    """InputError for processes that cannot share rows or weights evenly. Makes this process end with torchrun, and on a
    CPU connects it with the others."""
    if timeout < 1:
        raise InputError(f"--timeout={timeout}; expected a positive number of seconds")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    for name in PARALLEL:
        if processes % (each := getattr(recipe, name)):
            raise InputError(
                f"{name}={each} with {processes} process{'es' if processes > 1 else ''}; expected a start by "
                f"torchrun with a multiple of {each} processes"
            )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())
    if processes > 1 and not torch.accelerator.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))  # transformers leaves out the timeout


def grid(settings: TrainingArguments, **sizes: int) -> DeviceMesh:
    """All processes as a grid with named dimensions, the last of which has consecutive processes."""
    mesh = init_device_mesh(settings.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        _set_pg_timeout(settings.ddp_timeout_delta, group)
    return mesh


def is_connection_error(error: BaseException) -> bool:
    """Whether an error says that another process did not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def unresponsive_processes(timeout: int) -> str:
    """Says which processes did not answer: those that do not notice within ANSWER that another one is lost."""
    store, key = _get_default_store(), "headrace/noticed/{}".format
    try:
        store.set(key(dist.get_rank()), "")
        silent = [rank for rank in range(dist.get_world_size()) if not _noticed(store, key(rank))]
    except dist.DistError:  # the store was in the process that is lost
        silent = []
    if not silent:
        return "the processes have lost each other, as one of them ended or stalled"
    who = f"process {silent[0]} has" if len(silent) == 1 else f"processes {', '.join(map(str, silent))} have"
    return f"{who} not answered for {timeout} s or ended (see its output, and where it is by `py-spy dump`)"


def _noticed(store: dist.Store, key: str) -> bool:
    try:
        store.wait([key], ANSWER)
    except dist.DistStoreError:
        return False
    return True
