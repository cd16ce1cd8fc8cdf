"""The processes of torchrun: how they start, form groups, agree on a folder, and end when one of them fails or does not
answer."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ..data.rows import shifted
from ..extra.context_parallel import SequenceShard, context_parallel
from ..files.devices import present_device
from ..files.processes import LOCK, end_with_parent, holder_of, locked
from ..files.threads import Threads
from ..ops.loss import IGNORED
from ..utils.errors import InputError, require

TIMEOUT = 1800  # seconds
ANSWER = timedelta(seconds=10)  # in which processes that lost another one tell each other


@dataclass(frozen=True)
class Processes:
    """The processes of a run, of which this is number `rank`.

    device: of this process. row: the consecutive processes, `per_row` of them, that share the tokens of its rows.
    store: by which processes reach each other when one of them does not answer."""

    device: torch.device
    rank: int = 0
    count: int = 1
    per_row: int = 1
    row: dist.ProcessGroup | None = None
    timeout: int = TIMEOUT
    store: dist.Store | None = None

    @property
    def readers(self) -> int:
        """Number of processes, or of groups, that have rows of their own."""
        return self.count // self.per_row

    @property
    def reader(self) -> int:
        """The number of this process's group among them."""
        return self.rank // self.per_row

    def put(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch on the device of this process."""
        return {name: x.to(self.device) for name, x in batch.items()}

    def sum(self, x: Tensor) -> Tensor:
        """Adds x up over all processes."""
        if self.count > 1:
            dist.all_reduce(x := x.to(self.device))
        return x

    def sum_in_row(self, x: Tensor) -> Tensor:
        """Adds x up over the processes that share rows with this one."""
        if self.row is not None:
            dist.all_reduce(x, group=self.row)
        return x

    def part(self, batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """This process's tokens of a batch of rows of a length, with the labels that follow them. A short row is padded
        at its end."""
        if self.row is None:
            return batch
        labels = batch["shift_labels"] if "shift_labels" in batch else shifted(batch["labels"])
        missing = -labels.shape[1] % length
        ids, labels = F.pad(batch["input_ids"], (0, missing)), F.pad(labels, (0, missing), value=IGNORED)
        part = SequenceShard(self.row)
        mine = {"input_ids": part.split(ids), "labels": part.split(labels), "shift_labels": part.split(labels)}
        if "cu_seqlens" in batch:  # the padding follows the last sequence
            mine["cu_seqlens"] = torch.cat([batch["cu_seqlens"][:-1], batch["cu_seqlens"][-1:] + missing])
        return batch | mine

    def sharing_rows(self) -> AbstractContextManager[object]:
        return nullcontext() if self.row is None else context_parallel(self.row)

    def shared(self, module: nn.Module, unused: bool) -> nn.Module:
        """A module on the device of this process, with what lets the processes share its gradients. unused: whether a
        step may give some parameters none."""
        if self.count == 1:
            return module
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(module, devices, find_unused_parameters=unused)

    def mesh(self, shard: int) -> DeviceMesh:
        """All processes in rows of `shard` consecutive ones."""
        if shard == self.count:
            assert dist.group.WORLD is not None
            return DeviceMesh.from_group(dist.group.WORLD, self.device.type, mesh_dim_names=("dp_shard",))
        grid = torch.arange(self.count).view(-1, shard)
        timeout = timedelta(seconds=self.timeout)
        groups = [dist.new_subgroups_by_enumeration(lines.tolist(), timeout)[0] for lines in (grid.T, grid)]
        return DeviceMesh.from_group(groups, self.device.type, grid, mesh_dim_names=("dp_replicate", "dp_shard"))


def connect(timeout: int = TIMEOUT, context_parallel: int = 1, shard: int = 1) -> Processes:
    """Connects the processes that torchrun has started, and makes this one end with torchrun. InputError for processes
    that cannot share rows or weights evenly, or do not find each other.

    context_parallel, shard: number of processes that share the tokens of a row, and the weights."""
    require(1 <= timeout < 2**31, f"--timeout={timeout}; expected a positive number of seconds, less than 2^31")
    count = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    for name, each in (("context_parallel", context_parallel), ("shard", shard)):
        if count % each:
            raise InputError(
                f"{name}={each} with {count} process{'es' if count > 1 else ''}; expected a start by torchrun with a "
                f"multiple of {each} processes"
            )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())
    device = device_of_this_process()
    if count == 1:
        return Processes(device)
    limit, row = timedelta(seconds=timeout), None
    store = None if dist.is_initialized() else _meet(device, limit)
    if context_parallel > 1:
        row, _ = dist.new_subgroups(context_parallel, timeout=limit)
    return Processes(device, dist.get_rank(), count, context_parallel, row, timeout, store)


def _meet(device: torch.device, limit: timedelta) -> dist.Store:
    """Connects the processes, and returns the store by which they found each other."""
    try:
        store, rank, count = next(rendezvous("env://", timeout=limit))
        dist.init_process_group(dist.get_default_backend_for_device(device), None, limit, count, rank, store)
    except (ValueError, RuntimeError) as error:  # the launcher has set a part of what torchrun sets, or one is missing
        reason = str(error).splitlines()[0]
        raise InputError(f"the processes cannot find each other ({reason}); expected a start by torchrun") from error
    return store


def device_of_this_process() -> torch.device:
    """The accelerator of this process's number on its machine, without torchrun the current one, or the CPU."""
    if (device := present_device()).type == "cpu":
        return device
    number = int(os.environ.get("LOCAL_RANK", torch.accelerator.current_device_index()))
    try:
        torch.accelerator.set_device_index(number)
    except RuntimeError as error:
        raise InputError(f"LOCAL_RANK={number}: {str(error).splitlines()[0]}; expected a device per process") from error
    return torch.device(device.type, number)


# --- agreement -------------------------------------------------------------------------------------------------------


@contextmanager
def errors_in_all() -> Iterator[None]:
    """Ends the block in all processes alike: what one of them raises is raised in each. Otherwise the others would wait
    for that process until the timeout. All processes must come to the end of the block, so that processes may wait for
    each other in it only where an error is raised in all."""
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    errors = gathered(None if mine is None else sendable(mine))
    failed = next((number for number, error in enumerate(errors) if error is not None), None)
    if failed is not None:
        raise mine if mine is not None and failed == rank() else errors[failed]


def rank() -> int:
    """The number of this process among those of the run."""
    return dist.get_rank() if dist.is_initialized() else 0


def gathered(mine: Any) -> list[Any]:
    """The objects of all processes, in each of them."""
    every = [mine] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(every, mine)
    return every


def sendable(error: Exception) -> Exception:
    """The error, or one with its sentence if another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def agreed(folder: Path, choose: Callable[[], Path | None]) -> Iterator[Path | None]:
    """Locks the folder in process 0, where `choose` selects a checkpoint for all processes; yields the checkpoint.

    Raises:
        InputError: in every process, if process 0 raises one or another process does not see the folder.
    """
    with ExitStack() as held:
        message: Any = None
        with errors_in_all():
            if rank() == 0:
                holder, chosen = held.enter_context(locked(folder)), choose()
                message = holder, chosen and chosen.name
        holder, name = gathered(message)[0]
        visible = gathered((lock := folder / LOCK).is_file() and holder_of(lock) == holder)
        if not all(visible):
            raise InputError(
                f"process {visible.index(False)} does not see the folder that process 0 writes to; expected one "
                f"--output shared by all processes, got {str(folder)!r}"
            )
        yield None if name is None else folder / name


# --- a process that does not answer ----------------------------------------------------------------------------------


@contextmanager
def answering(processes: Processes, stopped: Callable[[str], InputError] = InputError) -> Iterator[None]:
    """Raises an InputError, `stopped` of what is wrong, if another process does not answer in the block."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise stopped(unresponsive(processes)) from error
        raise


def unresponsive(processes: Processes) -> str:
    """Says which processes did not answer: those that do not notice within ANSWER that another one is lost."""
    store, key, silent = processes.store, "headrace/noticed/{}".format, []
    with suppress(dist.DistError):  # the store was in the process that is lost
        if store is not None:
            store.set(key(processes.rank), "")
            silent = [rank for rank in range(processes.count) if not _noticed(store, key(rank))]
    if not silent:
        return "the processes have lost each other, as one of them ended or stalled"
    who = f"process {silent[0]} has" if len(silent) == 1 else f"processes {', '.join(map(str, silent))} have"
    return f"{who} not answered for {processes.timeout} s or ended (see its output, and where it is by `py-spy dump`)"


def _noticed(store: dist.Store, key: str) -> bool:
    try:
        store.wait([key], ANSWER)
    except dist.DistStoreError:
        return False
    return True


@contextmanager
def timed_steps(device: torch.device, number: int | None) -> Iterator[Callable[[float], None]]:
    """Yields what is told the seconds of each step: on a CPU, it sets the number of threads with which steps are
    fastest, or the given number."""
    if device.type != "cpu":
        yield lambda seconds: None
        return
    with Threads(number, lambda line: tqdm.write(f"threads: {line}")) as threads:
        yield threads.took
