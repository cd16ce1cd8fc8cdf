"""Agreement of the processes of a run: on the folder and the checkpoint to resume from before it begins, and on the end
of all of them when one fails."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..files.processes import LOCK, holder_of, locked
from ..utils.errors import InputError


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
        lock = folder / LOCK
        visible = gathered(lock.is_file() and holder_of(lock) == holder)
        if not all(visible):
            raise InputError(
                f"process {visible.index(False)} does not see the folder that process 0 writes to; expected one "
                f"--output shared by all processes, got {str(folder)!r}"
            )
        yield None if name is None else folder / name
