"""Processes that must not write into one folder, or must not outlive another."""

import ctypes
import fcntl
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from platform import node
from typing import IO

from .errors import InputError

LOCK = ".lock"
MADE_BY = "made-by.json"  # see provenance.py
LEFT = re.compile(rf"{re.escape(LOCK)}|{MADE_BY}|\.[\w-]+\.json\.\d+")  # by a process killed before it began
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def locked(folder: Path, file: Path | None = None) -> Iterator[str]:
    """Hold a folder, which is made where it is not there, until the block or the process ends; yields who holds it.

    file: what is locked, where it is not to be in the folder. Forked processes hold the lock with their parent.
    InputError where another process holds it, and where the folder cannot be written."""
    file = folder / LOCK if file is None else file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = _acquire(folder, file)
    except OSError as error:
        raise InputError(f"--output {str(folder)!r} cannot be written: {error.strerror}") from None
    with held:
        holder = f"process {os.getpid()} on {node()} since {datetime.now().isoformat(timespec='seconds')}"
        held.truncate(0)
        held.write(holder)
        held.flush()
        try:
            yield holder
        finally:
            file.unlink(missing_ok=True)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to fill within the block, at whose end it becomes `output`: whole or not there. Holds the lock.

    InputError where output exists, or is being made."""
    with locked_beside(output):
        if output.exists():
            raise InputError(f"--output {str(output)!r} exists; name another, or delete it")
        beside = output.with_name(f".{output.name}.unfinished")
        if beside.exists():  # of a process that was killed
            shutil.rmtree(beside)
        beside.mkdir()
        yield beside
        beside.rename(output)


def locked_beside(output: Path) -> AbstractContextManager[str]:
    """Hold a file or folder that is not there yet."""
    return locked(output, output.with_name(f".{output.name}.lock"))


def _acquire(folder: Path, file: Path) -> IO[str]:
    while True:
        held = file.open("a+", encoding="utf-8")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with held:
                raise InputError(
                    f"--output {str(folder)!r} is in use by {_holder(held)}; wait for it, or name another"
                ) from None
        if os.fstat(held.fileno()).st_nlink:
            return held
        held.close()  # who held it before has deleted it since we opened it


def _holder(held: IO[str]) -> str:
    held.seek(0)
    return held.read() or "another process"


class Terminated(KeyboardInterrupt):
    """SIGTERM, as Ctrl-C is a KeyboardInterrupt."""


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise Terminated within the block."""

    def end(number: int, frame: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_free(folder: Path) -> bool:
    """Whether a folder is not there, or holds nothing but what a process leaves that was killed before it began."""
    return not folder.exists() or (folder.is_dir() and all(LEFT.fullmatch(path.name) for path in folder.iterdir()))


def end_with_parent(parent: int) -> None:
    """Let this process be killed when its parent, of this id, ends, however that does. On Linux; elsewhere an orphan
    goes on to its end, and its lock keeps others from its folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


@contextmanager
def forks_end_with_parent() -> Iterator[None]:
    """Let what this thread forks within the block end when this process does, and leave signals to this process."""
    before = _parent.set(os.getpid())
    try:
        yield
    finally:
        _parent.reset(before)


def _after_fork() -> None:
    if (parent := _parent.get()) is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(parent)


_parent: ContextVar[int | None] = ContextVar("whom forked processes end with", default=None)
os.register_at_fork(after_in_child=_after_fork)
