"""What the processes of a run must have in common before it begins: a folder, and the checkpoint they go on from."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from ..utils.errors import InputError
from ..utils.processes import LOCK, locked


@contextmanager
def agreed(folder: Path, choose: Callable[[], Path | None]) -> Iterator[Path | None]:
    """Hold the folder by the first process, which chooses a checkpoint in it for all of them.

    InputError in every process where the first meets one, and where another does not see the folder."""
    with ExitStack() as held:
        told: list[Any] = [None]
        if PartialState().is_main_process:
            try:
                holder, chosen = held.enter_context(locked(folder)), choose()
                told = [(holder, chosen and chosen.name, None)]
            except InputError as error:
                told = [(None, None, str(error))]
        holder, name, refused = broadcast_object_list(told)[0]
        if refused is not None:
            raise InputError(refused)
        lock = folder / LOCK
        seen = gather_object([lock.is_file() and lock.read_text(encoding="utf-8") == holder])
        if not all(seen):
            raise InputError(
                f"process {seen.index(False)} does not see the folder that process 0 writes; expected one --output "
                f"for all, got {str(folder)!r} here"
            )
        yield None if name is None else folder / name
