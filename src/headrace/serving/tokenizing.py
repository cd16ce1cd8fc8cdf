"""The tokenizer and chat template of a folder, in a process that can be ended: neither their panics nor their loops
without end stop the server."""

import asyncio
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from ..convert.checkpoint import read_tokenizer
from ..files.processes import end_with_parent, interrupts_later
from .refusals import Refused, failed

T = TypeVar("T")
SECONDS = 10  # after which the process is ended
CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")


def import_ahead() -> None:
    """On Linux, begins a process from which the tokenizer's is forked, with its imports; macOS's survive no fork."""
    if CONTEXT.get_start_method() == "forkserver":
        from multiprocessing.forkserver import ensure_running

        CONTEXT.set_forkserver_preload([__name__])
        with interrupts_later():
            ensure_running()


class TokenizerProcess:
    """Does work with the tokenizer of a checkpoint: one piece at a time, as it may need a hundred times the memory of
    the text."""

    def __init__(self, checkpoint: Path):
        self.checkpoint, self.turn = checkpoint, asyncio.Lock()
        self.process: Any = None
        self.here: Any = None
        self.ready()

    async def __call__(self, work: Callable[[Any], T]) -> T:
        """The result of work(tokenizer), which are pickled. Refused if it takes too long or fails."""
        async with self.turn:
            await asyncio.to_thread(self.ready)
            answer = asyncio.ensure_future(asyncio.to_thread(self._ask, work))
            try:
                await asyncio.wait([answer], timeout=SECONDS)
            finally:  # also if the server ends
                if not answer.done():
                    self.process.kill()
            result = await answer
        if isinstance(result, Refused):
            raise result
        return result

    def ready(self) -> None:
        """Begins the process, if there is none."""
        if self.process is None or not self.process.is_alive():
            self.here, there = CONTEXT.Pipe()
            self.process = CONTEXT.Process(target=_work, args=(there, self.checkpoint), daemon=True)
            self.process.start()
            there.close()
            with suppress(EOFError):
                self.here.recv()  # that the tokenizer is read

    def _ask(self, work: Callable[[Any], T]) -> T | Refused:
        try:
            self.here.send(work)
            return self.here.recv()
        except (EOFError, OSError):
            self.process.join()
            sentence = "the tokenizer or chat template of the model was ended"
            return Refused(500, f"{sentence}; it may take at most {SECONDS} seconds")


def _work(connection: Connection, checkpoint: Path) -> None:
    """Answers until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(os.getppid())
    tokenizer = read_tokenizer(checkpoint)
    connection.send(True)
    with suppress(EOFError):
        while True:
            connection.send(_answer(connection.recv(), tokenizer))


def _answer(work: Callable[[Any], Any], tokenizer: Any) -> Any:
    try:
        return work(tokenizer)
    except Refused as refusal:
        return refusal
    except BaseException as error:  # a panic is no Exception
        traceback.print_exc()
        return Refused(500, failed(error))
