"""Agreement of the processes of a run, before it begins, on the folder and on the checkpoint to resume from."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from ..utils.errors import InputError
from ..utils.processes import LOCK, holder_of, locked


@contextmanager
def agreed(folder: Path, choose: Callable[[], Path | None]) -> Iterator[Path | None]:
    """Locks the folder in process 0, where `choose` selects a checkpoint for all processes; yields the checkpoint.

    Raises:
        InputError: in every process, if process 0 raises one or another process does not see the folder.
    """
    with ExitStack() as held:
        message: list[Any] = [None]
        if PartialState().is_main_process:
            try:
                holder, chosen = held.enter_context(locked(folder)), choose()
                message = [(holder, chosen and chosen.name, None)]
            except InputError as error:
                message = [(None, None, str(error))]
        holder, name, refused = broadcast_object_list(message)[0]
        if refused is not None:
            raise InputError(refused)
        lock = folder / LOCK
        visible = gather_object([lock.is_file() and holder_of(lock) == holder])
        if not all(visible):
            raise InputError(
                f"process {visible.index(False)} does not see the folder that process 0 writes to; expected one "
                f"--output shared by all processes, got {str(folder)!r}"
            )
        yield None if name is None else folder / name
