"""Locks on output folders, and the termination of processes by signals and with their parent."""

import ctypes
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from platform import node
from typing import IO, Any

from filelock import lock_descriptor

from ..utils.errors import InputError

LOCK = ".lock"
MADE_BY = "made-by.json"  # see provenance.py
# files that remain when a process is killed before its first result
LEFT = re.compile(rf"{re.escape(LOCK)}|{MADE_BY}|\.[\w-]+\.json\.\d+")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
POSIX = hasattr(os, "fork")  # not on Windows
MOST = 1024  # processes, or threads of PyTorch, which begins as many as it is told


@contextmanager
def locked(folder: Path, file: Path | None = None) -> Iterator[str]:
    """Locks a folder until the block or the process ends. Creates the folder and those around it if necessary, and
    deletes again those to which nothing was written. Yields a description of this process.

    file: the lock file, by default in the folder. Forked processes share the lock with their parent.
    Raises InputError if another process holds the lock, or if the folder cannot be written."""
    file, fresh = folder / LOCK if file is None else file, [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = _acquire(folder, file)
    except OSError as error:
        raise InputError(f"--output {str(folder)!r} cannot be written: {error.strerror}") from None
    with held:
        holder = f"process {os.getpid()} on {node()} since {datetime.now().isoformat(timespec='seconds')}"
        try:
            held.truncate(0)
            held.write(f" {holder}")
            held.flush()
            yield holder
        except Exception as error:
            _check_present(folder, file, error)
            raise
        else:
            _check_present(folder, file)
        finally:
            if POSIX:
                file.unlink(missing_ok=True)
            for made in fresh:
                with suppress(OSError):  # it is a file, not empty, or was never made
                    made.rmdir()
    if not POSIX:  # Windows deletes only what no process has open
        with suppress(PermissionError):
            file.unlink(missing_ok=True)


def _check_present(folder: Path, file: Path, cause: Exception | None = None) -> None:
    """Raises InputError if the lock file of a folder was deleted, and the folder with it."""
    if not file.exists():
        gone = f"--output {str(folder)!r} was removed while the command wrote to it"
        raise InputError(f"{gone}; run the command again") from cause


def holder_of(file: Path) -> str:
    """Returns the description of the process that holds a lock file; "" if it has written none."""
    with file.open(encoding="utf-8") as opened:
        opened.seek(1)  # on Windows nobody else reads the first byte, which is locked
        return opened.read()


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `output` at the end of the block, so that `output` is never
    incomplete. Holds the lock of `output`.

    Raises InputError if output exists, or if another process is making it."""
    with _making(output):
        beside = output.with_name(f".{output.name}.unfinished")
        if beside.exists():  # left by a process that was killed
            shutil.rmtree(beside)
        beside.mkdir()
        try:
            yield beside
            beside.rename(output)
        except BaseException:
            shutil.rmtree(beside)
            raise


@contextmanager
def resumed_folder(output: Path, worth: str) -> Iterator[tuple[Path, Path]]:
    """Yields a temporary folder with what a killed process has left, and an empty folder in it, which is renamed to
    `output` at the end of the block; then the temporary folder is deleted. An InputError in the block deletes a
    temporary folder without files that match the pattern `worth`. Holds the lock of `output`.

    Raises InputError if output exists, or if another process is making it."""
    with _making(output):
        work = output.with_name(f".{output.name}.parts")
        ready = work / "ready"
        shutil.rmtree(ready, ignore_errors=True)
        ready.mkdir(parents=True)
        try:
            yield work, ready
        except InputError:
            if not any(work.glob(worth)):
                shutil.rmtree(work)
            raise
        ready.rename(output)
        shutil.rmtree(work)


@contextmanager
def _making(output: Path) -> Iterator[None]:
    with locked_beside(output):
        if output.exists() or output.is_symlink():  # a link to nothing cannot be replaced by a folder
            raise InputError(f"--output {str(output)!r} exists; name another, or delete it")
        yield


def locked_beside(output: Path) -> AbstractContextManager[str]:
    """Locks a file or folder that does not exist yet, by a lock file beside it. InputError for a path without name."""
    if not output.name:  # as "", "." and "/"
        raise InputError(f"--output {str(output)!r} has no name of its own; expected a new file or folder")
    return locked(output, output.with_name(f".{output.name}.lock"))


def _acquire(folder: Path, file: Path) -> IO[str]:
    while True:
        held = file.open("a+", encoding="utf-8")
        if not lock_descriptor(held.fileno(), blocking=False):
            held.close()
            raise InputError(
                f"--output {str(folder)!r} is in use by {holder_of(file) or 'another process'}; wait for it, or name "
                "another"
            )
        if os.fstat(held.fileno()).st_nlink:
            return held
        held.close()  # the previous holder has deleted the file since it was opened here


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM in `terminable` blocks."""


@contextmanager
def handling(handler: Callable[[int, Any], None] | signal.Handlers, *signals: int) -> Iterator[None]:
    """Handles signals by `handler` within the block, in the main thread, which alone may set handlers."""
    here = signals if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handler) for number in here}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Ctrl-C in the block raises KeyboardInterrupt behind it. Processes that begin in the block are never interrupted:
    they inherit the mask of signals."""
    heard: list[int] = []
    with handling(lambda number, frame: heard.append(number), signal.SIGINT):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if POSIX else None
        try:
            yield
        finally:
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if heard:
        raise KeyboardInterrupt


def terminable() -> AbstractContextManager[None]:
    """Makes SIGTERM raise Terminated within the block."""

    def end(number: int, frame: object) -> None:
        raise Terminated

    return handling(end, signal.SIGTERM)


def is_free(folder: Path, plan: str | None = None) -> bool:
    """Whether a folder does not exist, or has only files of processes that were killed before their first result.

    plan: the name of a file that it may have too."""
    if not folder.is_dir():
        return not folder.exists()
    return all(LEFT.fullmatch(path.name) or path.name == plan for path in folder.iterdir())


def end_with_parent(parent: int) -> None:
    """Makes the system kill this process when its parent, with this process id, ends. On Linux only: elsewhere the
    process continues, and its lock protects its folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has already ended
            os._exit(1)


@contextmanager
def forks_end_with_parent() -> Iterator[None]:
    """Makes processes that this thread forks within the block end with this process, and ignore Ctrl-C."""
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


_parent: ContextVar[int | None] = ContextVar("process id that forked processes end with", default=None)
if POSIX:
    os.register_at_fork(after_in_child=_after_fork)
