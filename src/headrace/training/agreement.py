"""Agreement of the processes of a run: on the folder and the checkpoint to resume from before it begins, and on the end
of all of them when one fails."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

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
    errors = gather_object([None if mine is None else sendable(mine)])
    failed = next((rank for rank, error in enumerate(errors) if error is not None), None)
    if failed is not None:
        raise mine if mine is not None and failed == PartialState().process_index else errors[failed]


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
        message: list[Any] = [None]
        with errors_in_all():
            if PartialState().is_main_process:
                holder, chosen = held.enter_context(locked(folder)), choose()
                message = [(holder, chosen and chosen.name)]
        holder, name = broadcast_object_list(message)[0]
        lock = folder / LOCK
        visible = gather_object([lock.is_file() and holder_of(lock) == holder])
        if not all(visible):
            raise InputError(
                f"process {visible.index(False)} does not see the folder that process 0 writes to; expected one "
                f"--output shared by all processes, got {str(folder)!r}"
            )
        yield None if name is None else folder / name
